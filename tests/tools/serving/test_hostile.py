"""Keeps answering whatever clients, libraries and their texts do: nobody else waits, and nothing is left behind."""

import json
import logging
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from ssl import CERT_NONE, PROTOCOL_TLS_SERVER, MemoryBIO, SSLContext, SSLWantReadError, create_default_context
from unittest.mock import Mock

import httpx
import pytest
import trustme
from tokenizers import Tokenizer
from trt_spec.engines import EngineEnded, RequestError
from trt_spec.runtime import Grammar
from trt_spec.runtime.grammars import trials
from trt_spec.tools.serving import completions, connections, delivery, guard, raw_bodies, server, service, stepper
from trt_spec.tools.serving.access_log import JsonForm, TextForm
from trt_spec.tools.serving.bodies import MOST_PARTS, read_body
from trt_spec.tools.serving.connections import Connection, raise_file_limit
from trt_spec.tools.serving.encoding import most_characters
from trt_spec.tools.serving.tokenising import encoded
from trt_spec.tools.serving.tokens import completion_logprobs
from trt_spec.tools.serving.tool_calls import MOST_TOOLS_BYTES

from ...kit.bundles import Pair
from ...kit.waiting import until
from .conftest import TEMPLATE, Gate, Served, serving

SHIPPED = Path(__file__).parents[3] / "tools" / "demo_pair" / "pycode-14m"
LONG = {"prompt": "abc", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


class Panic(BaseException):
    """As PyO3 raises, which is no Exception."""


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What the server logs."""
    found: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    handler, logger = Kept(), logging.getLogger("trt_spec")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.setLevel(level)
    logger.removeHandler(handler)


# The stepping thread.


@pytest.fixture
def dying(llama: Pair, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server with a live request and one that waits, whose decoder panics in its next round."""
    with serving(llama, max_batch=1, max_waiting=2) as served:
        yield served
        gate.let(10_000)


def test_a_library_that_panics_ends_all_requests_and_then_the_server(
    dying: Served, gate: Gate, logged: list[logging.LogRecord]
):
    found: list[httpx.Response | Exception] = []

    def ask(stream: bool) -> None:
        try:
            found.append(httpx.post(f"{dying.url}/v1/completions", json=LONG | {"stream": stream}, timeout=30))
        except httpx.HTTPError as error:
            found.append(error)

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    until(lambda: len(dying.service.stepper.tickets) == 2)
    step = dying.decoder.step

    def panic() -> bool:
        dying.decoder.step = step
        raise Panic("the tokenizer is poisoned")

    dying.decoder.step = panic
    gate.let(10_000)
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert all("the decoder has failed (the tokenizer is poisoned)" in one.text for one in found)
    assert {one.status_code for one in found} == {200, 500}, "the stream had begun"
    until(lambda: not dying.service.stepper.tickets)
    assert dying.service.stepper.state == "dead"
    assert any(record.levelno == logging.CRITICAL for record in logged)

    def refused() -> bool:
        try:
            return httpx.get(f"{dying.url}/ready", timeout=5).status_code != 503
        except httpx.HTTPError:
            return True

    until(refused)  # it ends by itself


def test_while_it_ends_it_says_that_it_is_dead(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    with serving(llama) as served:
        stepper = served.service.stepper
        monkeypatch.setattr(stepper, "dead", threading.Event())  # so that the server stays
        monkeypatch.setattr(served.decoder, "step", lambda: (_ for _ in ()).throw(Panic("gone")))
        response = served.post("/v1/completions", LONG)
        assert response.status_code in (500, 503)
        until(lambda: stepper.state == "dead")
        for path in ("/ready", "/health"):
            answer = served.http.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, "dead")
        refused = served.post("/v1/completions", LONG)
        assert refused.json()["error"]["code"] == "engine_dead"


def ended() -> None:
    raise EngineEnded("a shard has gone")


def test_an_engine_that_has_ended_ends_the_server_before_another_round_fails(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
):
    with serving(llama) as served:
        monkeypatch.setattr(served.decoder, "step", ended)
        assert "the decoder has failed (a shard has gone)" in served.post("/v1/completions", LONG).text
        until(lambda: served.service.stepper.state == "dead")


def test_an_engine_that_ends_while_there_is_nothing_to_do_ends_the_server(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stepper, "IDLE_SECONDS", 0.01)
    with serving(llama) as served:
        assert served.post("/v1/completions", LONG | {"max_tokens": 1}).status_code == 200
        monkeypatch.setattr(served.decoder.target.engine, "require", ended)
        until(lambda: served.service.stepper.state == "dead")


def test_a_step_that_waits_for_a_device_that_has_gone_ends_the_server(
    llama: Pair, gate: Gate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """It may never come back, so the process ends without its thread."""
    monkeypatch.setattr(stepper, "WAITING_SECONDS", 0.05)
    monkeypatch.setattr(stepper, "JOIN_SECONDS", 0.2)
    monkeypatch.setattr(stepper, "LEAVING_SECONDS", 0.2)
    left: list[int] = []
    monkeypatch.setattr(stepper.os, "_exit", left.append)
    with serving(llama, max_batch=1) as served:
        answers = iter([RuntimeError("not known"), "shard 1 has ended"])
        monkeypatch.setattr(served.decoder.target.engine, "gone", Mock(side_effect=answers))
        answer = served.post("/v1/completions", LONG)
        assert (answer.status_code, "has failed (shard 1 has ended)" in answer.text) == (500, True)
        assert served.service.stepper.alive, "the thread is in its step"
        assert served.service.stepper.state == "dead"
        until(lambda: served.service.stepper._closing)
        monkeypatch.setattr(server, "run_loop", lambda coroutine: coroutine.close())
        server.serve(None, served.service, None, 0, lambda: None)
        assert left == [server.BROKEN]
        assert "shard 1 has ended" in capsys.readouterr().err
        gate.let(10_000)


def test_an_engine_that_never_says_whether_it_is_there_is_stuck(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    goes_on = threading.Event()
    monkeypatch.setattr(stepper, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(stepper, "STUCK_SECONDS", 0.1)
    with serving(llama) as served:
        assert served.post("/v1/completions", LONG | {"max_tokens": 1}).status_code == 200
        monkeypatch.setattr(served.decoder.target.engine, "require", goes_on.wait)
        until(lambda: served.service.stepper.state == "stuck")
        goes_on.set()
        until(lambda: served.service.stepper.state == "alive")


def test_the_process_of_a_dead_decoder_ends_with_a_code_of_its_own(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    with serving(llama) as served:
        monkeypatch.setattr(served.decoder, "step", lambda: (_ for _ in ()).throw(Panic("gone")))
        served.post("/v1/completions", LONG)
        until(lambda: served.service.stepper.state == "dead")
    monkeypatch.setattr(server, "run_loop", lambda coroutine: coroutine.close())
    assert server.serve(None, served.service, None, 0, lambda: None) == server.BROKEN
    assert "the decoder has failed (gone); start the server again" in capsys.readouterr().err


def test_a_step_that_never_ends_shows_and_does_not_keep_the_server_from_ending(
    llama: Pair, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stepper, "STUCK_SECONDS", 0.2)
    for module, name in ((stepper, "JOIN_SECONDS"), (stepper, "CANCEL_SECONDS"), (server, "LINGER_SECONDS")):
        monkeypatch.setattr(module, name, 0.2)
    with serving(llama, max_batch=1, drain_seconds=0.2) as served:
        assert served.http.get("/health").json() == {"status": "alive"}
        ended: list[int] = []
        monkeypatch.setattr(stepper.os, "_exit", ended.append)
        client = threading.Thread(target=lambda: httpx.post(f"{served.url}/v1/completions", json=LONG, timeout=60))
        client.start()
        until(lambda: served.service.stepper.state == "stuck")
        for path in ("/ready", "/health"):
            answer = served.http.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, "stuck")
        served.end()
        until(lambda: served.service.stepper._closing)
        monkeypatch.setattr(server, "run_loop", lambda coroutine: coroutine.close())
        server.serve(None, served.service, None, 0, lambda: None)
        assert ended == [server.BROKEN]
        gate.let(10_000)
        client.join(timeout=30)


# Connections.


def open_sockets(served: Served, count: int, stack: ExitStack, said: bytes = b"") -> list[socket.socket]:
    host, port = served.url.rpartition("//")[2].split(":")
    found = [stack.enter_context(socket.create_connection((host, int(port)), timeout=30)) for _ in range(count)]
    for one in found:
        one.sendall(said)
    return found


def is_closed(one: socket.socket) -> bool:
    """Whether the server has closed a connection, after whatever it has said."""
    try:
        while one.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


@pytest.mark.parametrize(
    "said",
    [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n", b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nab"],
    ids=["nothing", "half of its headers", "half of its body"],
)
def test_a_client_that_lets_the_server_wait_is_cut_off(llama: Pair, monkeypatch: pytest.MonkeyPatch, said: bytes):
    for name, seconds in (("HEADER_SECONDS", 0.2), ("BODY_SECONDS", 0.2), ("LOOK_SECONDS", 0.05)):
        monkeypatch.setattr(connections, name, seconds)
    with serving(llama) as served, ExitStack() as stack:
        [slow] = open_sockets(served, 1, stack, said)
        assert is_closed(slow)
        assert served.http.get("/health").status_code == 200


def test_headers_that_come_byte_by_byte_are_no_excuse(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.3)
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.05)
    with serving(llama) as served, ExitStack() as stack:
        [slow] = open_sockets(served, 1, stack, b"GET /health HTTP/1.1\r\nX: ")
        began = time.monotonic()
        with suppress(ConnectionError):
            while time.monotonic() < began + 10:
                slow.sendall(b"x")
                time.sleep(0.02)
        assert time.monotonic() - began < 5


def test_an_answer_may_take_as_long_as_it_takes(llama: Pair, gate: Gate, monkeypatch: pytest.MonkeyPatch):
    for name, seconds in (("HEADER_SECONDS", 0.1), ("BODY_SECONDS", 0.1), ("LOOK_SECONDS", 0.02)):
        monkeypatch.setattr(connections, name, seconds)
    with serving(llama) as served:
        threading.Timer(0.6, gate.let, [10_000]).start()
        assert served.post("/v1/completions", LONG).status_code == 200


def test_too_many_idle_connections_make_room_for_who_has_something_to_say(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
):
    monkeypatch.setattr(Connection, "most", 8)
    monkeypatch.setattr(Connection, "_warned", -1e9)
    with serving(llama) as served, ExitStack() as stack:
        idle = open_sockets(served, 30, stack)
        for _ in range(3):
            assert httpx.get(f"{served.url}/health", timeout=5).status_code == 200
        assert all(is_closed(one) for one in idle[:20]), "those that were waited for longest"
    assert sum("more than 8 connections" in record.getMessage() for record in logged) == 1, "said once a minute"


def test_slow_bodies_make_room_too(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Connection, "most", 8)
    with serving(llama) as served, ExitStack() as stack:
        head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        slow = open_sockets(served, 30, stack, head + b"ab")
        assert all(is_closed(one) for one in slow[:20])
        assert httpx.get(f"{served.url}/health", timeout=5).status_code == 200


@pytest.fixture(scope="module")
def tls() -> SSLContext:
    context = SSLContext(PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
    return context


def healthy(url: str) -> bool:
    """Ask as a client whose whole request comes together with the end of its handshake."""
    trusting = create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, CERT_NONE
    host, port = url.removeprefix("https://").split(":")
    incoming, outgoing = MemoryBIO(), MemoryBIO()
    client = trusting.wrap_bio(incoming, outgoing)
    with socket.create_connection((host, int(port)), timeout=10) as plain:
        while True:
            try:
                client.do_handshake()
                break
            except SSLWantReadError:
                plain.sendall(outgoing.read())
                incoming.write(plain.recv(2**16))
        client.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        plain.sendall(outgoing.read())
        while True:
            with suppress(SSLWantReadError):
                return client.read(15) == b"HTTP/1.1 200 OK"
            incoming.write(plain.recv(2**16))


def test_connections_without_a_handshake_make_room_and_end(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, tls: SSLContext
):
    monkeypatch.setattr(Connection, "most", 8)
    with serving(llama, tls=tls) as served, ExitStack() as stack:
        idle = open_sockets(served, 30, stack)
        assert all(is_closed(one) for one in idle[:20])
        assert healthy(served.url)
    for name, seconds in (("HEADER_SECONDS", 0.2), ("LOOK_SECONDS", 0.05)):
        monkeypatch.setattr(connections, name, seconds)
    with serving(llama, tls=tls) as served, ExitStack() as stack:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n"):
            [slow] = open_sockets(served, 1, stack, said)
            assert is_closed(slow)
        assert healthy(served.url)


def test_a_client_that_does_not_take_its_answer_is_cut_off(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, logged: list[logging.LogRecord]
):
    monkeypatch.setattr(connections, "TAKE_SECONDS", 0.2)
    monkeypatch.setattr(connections, "LOOK_SECONDS", 0.05)
    with serving(llama) as served, ExitStack() as stack:
        each = len(served.http.get("/openapi.json").content)
        slow = stack.enter_context(socket.socket())
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = served.url.removeprefix("http://").split(":")
        slow.connect((host, int(port)))
        slow.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 400)
        until(lambda: any("has taken nothing of its answer" in record.getMessage() for record in logged))
        taken = 0
        with suppress(ConnectionError):
            while part := slow.recv(2**20):
                taken += len(part)
        assert taken < 400 * each
        assert served.http.get("/health").status_code == 200


def test_a_body_in_chunks_of_a_byte_stops_nobody(served: Served):
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with ExitStack() as stack:
        [hostile] = open_sockets(served, 1, stack, head)
        sending = threading.Thread(target=hostile.sendall, args=[b"1\r\n \r\n" * 200_000 + b"0\r\n\r\n"])
        sending.start()
        asked = 0
        while not select.select([hostile], [], [], 0)[0]:
            assert served.http.get("/health").status_code == 200
            asked += 1
        sending.join()
        assert hostile.recv(12) == b"HTTP/1.1 400"
    assert asked > 20, "as for parts that are read one after another, with nobody between them"


def test_a_large_body_is_read_in_few_parts_and_one_in_chunks_of_a_byte_in_small_ones(
    served: Served, monkeypatch: pytest.MonkeyPatch
):
    """Each part waits for the rounds of others, and chunks of a byte keep others waiting."""
    parts, read = [], connections.H11Protocol.data_received

    def noted(self: Connection, data: bytes) -> None:
        parts.append(len(data))
        read(self, data)

    monkeypatch.setattr(connections.H11Protocol, "data_received", noted)
    body = b'{"prompt": "abc", "user": "%b"}' % (b"a" * 4_000_000)
    answer = served.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200
    assert sum(parts) > 4_000_000
    assert len(parts) < 400, "in parts of four kilobytes there were a thousand"
    parts.clear()
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    with ExitStack() as stack:
        [hostile] = open_sockets(served, 1, stack, head)
        large = b"%x\r\n%b\r\n" % (600_000, b" " * 600_000)  # after which parts are as long as they may become
        hostile.sendall(large + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n")
        assert hostile.recv(12) == b"HTTP/1.1 400"
    assert max(parts[len(parts) // 2 :]) <= 2 * connections.LEAST_PART
    assert max(parts) <= 2**14, "so long the first of chunks of a byte may be"


def test_what_follows_an_answer_and_is_no_request_ends_the_connection_without_a_word(
    llama: Pair, capfd: pytest.CaptureFixture[str]
):
    with serving(llama, keys=["key"]) as served, ExitStack() as stack:
        head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        [hostile] = open_sockets(served, 1, stack, head)
        assert hostile.recv(12) == b"HTTP/1.1 401"
        hostile.sendall(b"no chunk\r\n")
        assert is_closed(hostile)
    assert "Traceback" not in capfd.readouterr().err


def test_many_bodies_that_wait_for_their_last_byte_do_not_fill_the_memory(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(guard, "MOST_HELD_BYTES", 10_000)
    body = b'{"prompt": "abc", "user": "%b"}' % (b"a" * 8000)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    asked = {"content": body, "headers": {"content-type": "application/json"}}
    with serving(llama) as served, ExitStack() as stack:
        [slow] = open_sockets(served, 1, stack, head % len(body) + body[:-1])
        until(lambda: served.http.post("/v1/completions", **asked).status_code == 503)
        refused = served.http.post("/v1/completions", **asked)
        assert (refused.json()["error"]["code"], refused.headers["retry-after"]) == ("busy", "1")
        assert served.http.get("/health").status_code == 200
        slow.sendall(body[-1:])
        assert slow.recv(12) == b"HTTP/1.1 200"
        assert served.http.post("/v1/completions", **asked).status_code == 200


def test_the_end_of_the_server_waits_for_no_body(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(server, "LINGER_SECONDS", 60)
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\nab"
    with serving(llama) as served, ExitStack() as stack:
        [slow] = open_sockets(served, 1, stack, head)
        assert served.http.get("/health").status_code == 200
        slow.settimeout(20)
        served.end()
        assert is_closed(slow)
    assert "Traceback" not in capfd.readouterr().err


def test_a_client_that_leaves_before_its_body_has_ended_is_no_failure(served: Served, logged: list[logging.LogRecord]):
    head = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nX-Request-Id: left\r\nContent-Type: application/json\r\n"
    with ExitStack() as stack:
        open_sockets(served, 1, stack, head + b"Content-Length: 9\r\n\r\nab")

    def of_it() -> list[dict]:
        return [fields for one in logged if (fields := getattr(one, "fields", {})).get("id") == "left"]

    until(of_it)
    assert of_it()[0]["status"] == 499
    assert not [one for one in logged if one.levelno >= logging.ERROR]


def test_the_process_may_open_as_many_files_as_the_system_lets_it(monkeypatch: pytest.MonkeyPatch):
    limits = {resource.RLIMIT_NOFILE: (256, 4096)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(resource, "setrlimit", limits.__setitem__)
    assert raise_file_limit() == 4096 - connections.OTHER_FILES
    assert limits[resource.RLIMIT_NOFILE] == (4096, 4096)


def test_a_request_with_two_lengths_is_refused_and_its_connection_ends(served: Served):
    body = b'{"prompt": "a"}'
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    )
    sent = head + b"Content-Length: %d\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), len(body), body)
    with ExitStack() as stack:
        [client] = open_sockets(served, 1, stack, sent)
        answer = b""
        while part := client.recv(4096):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"Content-Length and Transfer-Encoding" in answer


# Long texts.


def test_a_text_that_no_model_could_read_is_refused_before_it_is_read(served: Served, monkeypatch: pytest.MonkeyPatch):
    most = served.service.longest.token * served.service.max_length
    text = " " * (most + 1)
    for path, body, field in (
        ("/v1/completions", {"prompt": text}, "prompt"),
        ("/v1/completions", {"prompt": "a", "prediction": {"type": "content", "content": text}}, "prediction"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}, "messages"),
        ("/tokenize", {"prompt": text * 1024}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": text * 1024}]}, "messages"),
    ):
        error = served.post(path, body).json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", field), path
        assert " characters, expected at most " in error["message"]


def test_a_text_of_too_many_tokens_is_refused_before_they_are_listed(served: Served, monkeypatch: pytest.MonkeyPatch):
    """To list millions of tokens holds up all other threads."""
    long, user = "a " * (served.service.max_length // 2 + 1), {"role": "user", "content": "a " * 300}
    monkeypatch.setattr(service, "MOST_COUNTED", 400)
    completions, chats = "/v1/completions", "/v1/chat/completions"
    for path, body, said in (
        (completions, {"prompt": long}, "prompt has 258 tokens, expected at most 256"),
        (completions, {"prompt": "a", "prediction": {"type": "content", "content": long}}, "prediction has 258"),
        (
            completions,
            {"prompt": "a " * 250, "truncate_prompt_tokens": 9},
            "prompt has 500 tokens, expected at most 400",
        ),
        (chats, {"messages": [user | {"content": long}]}, "messages has 263"),
        (chats, {"messages": [user], "truncate_prompt_tokens": 9}, "messages has 605"),
        ("/v1/messages/count_tokens", {"messages": [user]}, "messages has 605"),
        ("/tokenize", {"prompt": "a " * 250}, "prompt has 500"),
        ("/tokenize", {"messages": [user]}, "messages has 605"),
    ):
        answer = served.post(path, body)
        assert answer.status_code == 400, path
        assert said in answer.json()["error"]["message"], path
    error = served.post("/detokenize", {"tokens": [5] * 401}).json()["error"]
    assert error["message"].startswith("there are 401 tokens, expected at most 400")
    assert served.post("/tokenize", {"prompt": "a " * 200}).json()["count"] == 400, "more than the model takes"
    body = {"prompt": "a " * 200, "truncate_prompt_tokens": 9, "max_tokens": 1}
    assert served.post(completions, body).json()["usage"]["prompt_tokens"] == 9


def test_a_long_text_waits_for_no_huge_one(served: Served, monkeypatch: pytest.MonkeyPatch):
    begun, goes_on = threading.Event(), threading.Event()

    def slow(tokenizer: Tokenizer, text: str, *more: object) -> list[int]:
        if len(text) >= service.HUGE_TEXT:
            begun.set()
            goes_on.wait(60)
        return encoded(tokenizer, text, *more)

    monkeypatch.setattr(service, "encoded", slow)
    huge = threading.Thread(target=served.post, args=["/tokenize", {"prompt": "a" * service.HUGE_TEXT}])
    huge.start()
    begun.wait(60)
    try:
        assert httpx.post(f"{served.url}/tokenize", json={"prompt": "a" * 3000}, timeout=20).json()["count"] == 3000
    finally:
        goes_on.set()
        huge.join()


def test_between_two_large_bodies_others_have_their_turn(served: Served, monkeypatch: pytest.MonkeyPatch):
    read: list[float] = []

    def slow(raw: bytes, kind: type) -> object:
        if len(raw) >= raw_bodies.LARGE_BODY:
            time.sleep(0.2)
            read.append(time.monotonic())
        return read_body(raw, kind)

    monkeypatch.setattr(raw_bodies, "read_body", slow)
    body = {"prompt": "a", "user": "a" * raw_bodies.LARGE_BODY, "max_tokens": 1}
    asked: list[float] = []
    clients = [
        threading.Thread(target=httpx.post, args=[f"{served.url}/v1/completions"], kwargs={"json": body})
        for _ in range(4)
    ]
    for client in clients:
        client.start()
    while len(read) < 4:
        assert served.http.get("/health").status_code == 200
        asked.append(time.monotonic())
    for client in clients:
        client.join()
    assert all(any(one < at < other for at in asked) for one, other in pairwise(read))


def test_more_parts_than_a_conversation_has_are_refused(served: Served):
    user = {"role": "user", "content": "a"}
    tool = {"type": "function", "function": {"name": "f", "description": "a" * MOST_TOOLS_BYTES}}
    for path, body, param in (
        ("/v1/chat/completions", {"messages": [user] * (MOST_PARTS + 1)}, "messages"),
        ("/v1/responses", {"input": [user] * (MOST_PARTS + 1)}, "input"),
        ("/v1/chat/completions", {"messages": [user], "tools": [tool]}, "tools"),
        ("/v1/completions", {"prompt": "a", "allowed_token_ids": [5] * 65}, "allowed_token_ids"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {f"{n:03}": 1 for n in range(65)}}, "logit_bias"),
    ):
        assert served.post(path, body).json()["error"]["param"] == param


def test_what_is_nested_by_the_hundreds_is_the_requests_error(signs: Pair):
    user = {"role": "user", "content": "a"}
    spelled = TEMPLATE + "{{ tools | tojson }}"
    with serving(signs, template=spelled) as served:
        for depth in (100, 400, sys.getrecursionlimit() - 100):  # torch's compiler raises the limit
            deep = json.loads('{"a":' * depth + "1" + "}" * depth)
            tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
            called = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": deep}]}
            for path, body in (
                ("/v1/chat/completions", {"messages": [user], "tools": [tool]}),
                ("/v1/messages", {"messages": [user, called, user], "max_tokens": 1}),
            ):
                answer = served.post(path, body | {"max_tokens": 1})
                assert answer.status_code in (200, 400), (depth, path)
        assert "nested too deeply" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_takes_long_to_write_is_not_written_in_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
):
    body = LONG | {"logprobs": 3, "echo": True, "stream": stream, "prompt": "abcdefgh" * 5, "max_tokens": 40}
    expected = served.post("/v1/completions", body).text
    threads: set[str] = set()

    def noted(*arguments: object) -> object:
        threads.add(threading.current_thread().name)
        return completion_logprobs(*arguments)

    monkeypatch.setattr(completions, "completion_logprobs", noted)
    monkeypatch.setattr(delivery, "MANY_TOKENS", 30)
    found = served.post("/v1/completions", body).text
    assert without_names(found) == without_names(expected)
    assert any("AnyIO" in name for name in threads), "as for the prompt, which has 40 tokens"


def without_names(answer: str) -> str:
    """An answer but for what is new each time, in however many chunks it comes."""
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith(("{", "data: {"))]
    return "".join(one["text"] for line in lines for one in json.loads(line)["choices"])


def test_what_a_client_has_sent_comes_back_in_an_error_only_in_part(served: Served):
    for body in ({"prompt": "a", "x" * 10**6: 1}, {"prompt": "a", "model": "x" * 10**6}):
        answer = served.post("/v1/completions", body)
        assert answer.status_code in (400, 404)
        assert len(answer.content) < 2000
    assert answer.json()["error"]["message"].endswith("is not served here, expected 'tiny'")


def test_reading_a_long_text_stops_no_other_thread():
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    text, gaps, ended = " " * 300_000, [0.0], threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not ended.wait(0.001):
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.perf_counter()
    ids = encoded(tokenizer, text, False)
    took = time.perf_counter() - began
    ended.set()
    ticking.join()
    assert tokenizer.decode(ids) == text
    assert max(gaps) < took / 2, "as for one call that keeps the lock"


@pytest.mark.parametrize(
    ("change", "per_token"),
    [
        ({}, 1),
        ({"normalizer": {"type": "NFC"}}, 4),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Strip"}, {"type": "NFC"}]}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}, 1),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}}, None),
        ({"pre_tokenizer": {"type": "WhitespaceSplit"}}, None),
        ({"pre_tokenizer": {"type": "Split", "behavior": "Removed"}}, None),
        ({"pre_tokenizer": {"type": "Split", "behavior": "Isolated"}}, 1),
        ({"model": {"unk_token": "<unk>"}}, None),
        ({"model": {"unk_token": "<unk>", "byte_fallback": True}}, 1),
    ],
    ids=str,
)
def test_how_long_a_text_may_be_follows_from_what_the_tokenizer_leaves_out(change: dict, per_token: int | None):
    tokenizer = Tokenizer.from_str(
        json.dumps(
            {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "aaa": 1}, "merges": []}}
        )
    )
    spec = {"normalizer": None, "pre_tokenizer": {"type": "ByteLevel"}, "model": {}} | change
    assert most_characters(tokenizer, spec) == (None if per_token is None else per_token * 3)


# Formats and the log.


def test_grammars_that_wait_keep_nobody_else_waiting(signs: Pair, monkeypatch: pytest.MonkeyPatch):
    """More of them than there are threads for texts and templates."""
    monkeypatch.setattr(trials, "WAIT_SECONDS", 60)
    found: list[httpx.Response] = []
    with serving(signs) as served:
        body = {"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "a"}}
        assert served.post("/v1/completions", body).status_code == 200
        tried = served.decoder._intake.grammars._trials

        def ask(number: int) -> None:
            asked = body | {"structured_outputs": {"regex": f"a{{{number}}}"}}
            found.append(httpx.post(f"{served.url}/v1/completions", json=asked, timeout=60))

        asking = [threading.Thread(target=ask, args=[number]) for number in range(1, 51)]
        with tried._lock:
            for one in asking:
                one.start()
            until(lambda: served.service._compiling.borrowed_tokens == 50)
            chat = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 1}
            assert httpx.post(f"{served.url}/v1/chat/completions", json=chat, timeout=20).status_code == 200
        for one in asking:
            one.join()
        assert {one.status_code for one in found} == {200}
        monkeypatch.setattr(trials, "WAIT_SECONDS", 0.01)
        with tried._lock:
            busy = served.post("/v1/completions", body | {"structured_outputs": {"regex": "b"}})
        assert (busy.status_code, busy.json()["error"]["code"], busy.headers["retry-after"]) == (503, "busy", "1")


def test_the_schema_of_a_json_object_is_honoured_and_what_is_unknown_is_refused():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = Grammar.from_response_format({"type": "json_object", "schema": schema})
    assert asked == Grammar.json_schema(schema)
    for response_format, field in (
        ({"type": "json_object", "scheme": schema}, "scheme"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}, "schema": schema}, "schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "shema": 1}}, "shema"),
    ):
        with pytest.raises(RequestError, match=f"has the field '{field}', expected"):
            Grammar.from_response_format(response_format)


def test_bad_token_ids_name_their_field(served: Served):
    for body, param in (({"logit_bias": {"999": 1}}, "logit_bias"), ({"stop_token_ids": [999]}, "stop_token_ids")):
        assert served.post("/v1/completions", {"prompt": "a"} | body).json()["error"]["param"] == param


@pytest.mark.parametrize("sign", ["\x9b31m", "\x85", "\x7f", "\u202e", "\u2028", "\U000e0041", "\x1b["])
def test_the_log_shows_no_sign_that_a_terminal_would_obey_or_hide(sign: str):
    for form in (TextForm(), JsonForm()):
        record = logging.LogRecord("x", logging.INFO, "x", 1, "request", (), None)
        record.fields = {"path": f"/a{sign}b"}
        line = form.format(record)
        assert line.isprintable()
        assert "\\u" in line
        said = logging.LogRecord("x", logging.ERROR, "x", 1, f"a request failed: {sign}", (), None)
        assert form.format(said).isprintable()


# Clients and their keys.


def test_what_one_key_leaves_is_found_by_no_other(signs: Pair):
    body = {"prompt": "abcdefgh" * 12, "max_tokens": 3}
    with serving(signs, keys=["first", "second"], prefix_bytes=2**22) as served:
        cached = [
            served.http.post(
                "/v1/completions", json=body | {"cache_salt": salt}, headers={"authorization": f"Bearer {key}"}
            ).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for key, salt in (("first", ""), ("second", ""), ("first", "own"), ("first", ""), ("second", ""))
        ]
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) > 0


def test_a_client_may_send_back_what_it_was_answered(served: Served):
    asked = {"model": "tiny", "max_completion_tokens": 4, "temperature": 0, "extra_body": {"ignore_eos": True}}
    messages = [{"role": "user", "content": "abc"}]
    answered = served.openai.chat.completions.create(messages=messages, **asked).choices[0].message
    history = [*messages, answered.model_dump() | {"annotations": [], "parsed": None}, {"role": "user", "content": "d"}]
    found = served.openai.chat.completions.create(messages=history, **asked)
    plain = [*messages, {"role": "assistant", "content": answered.content}, history[-1]]
    expected = served.openai.chat.completions.create(messages=plain, **asked)
    assert found.choices[0].message.content == expected.choices[0].message.content


def test_streamed_token_ids_are_those_that_were_written(served: Served):
    body = LONG | {"max_tokens": 6, "echo": True, "logprobs": 1, "return_token_ids": True, "draft_length": 2}
    whole = served.post("/v1/completions", body).json()["choices"][0]
    lines = served.post("/v1/completions", body | {"stream": True}).text.splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    streamed = [token for chunk in chunks for one in chunk["choices"] for token in one.get("token_ids", ())]
    assert streamed == whole["token_ids"]
    assert "".join(one["text"] for chunk in chunks for one in chunk["choices"]) == whole["text"]
