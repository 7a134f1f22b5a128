"""Requests come and go: clients that leave, a full queue, a round that fails, a server that is told to end."""

import asyncio
import gc
import json
import threading
import time
from collections.abc import Coroutine
from importlib.util import find_spec
from typing import Any
from unittest.mock import Mock

import httpx
import openai
import pytest
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.serving import stepper
from trt_spec.tools.serving.server import run_loop, serve

from ...kit.bundles import Pair
from ...kit.waiting import until
from .conftest import Gate, Served, serving

LONG = {"prompt": "abc", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def small(llama: Pair, gate: Gate):
    """A server of one row and one place to wait, whose rounds are held by the gate."""
    with serving(llama, max_batch=1, max_waiting=1) as server:
        yield server
        gate.let(10_000)


def metric(served: Served, name: str) -> float:
    lines = served.http.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))


def in_thread(served: Served, body: dict, found: list) -> threading.Thread:
    def ask() -> None:
        found.append(httpx.post(f"{served.url}/v1/completions", json=body, timeout=60))

    thread = threading.Thread(target=ask)
    thread.start()
    return thread


def test_the_server_runs_in_the_loop_that_the_extra_brings():
    loops = []

    async def note_the_loop() -> None:
        loops.append(type(asyncio.get_running_loop()).__module__)

    run_loop(note_the_loop())
    assert loops == ["uvloop"]


def test_a_client_that_offers_http_2_keeps_its_body_without_a_word_in_the_log(
    served: Served, capfd: pytest.CaptureFixture[str]
):
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQAoAAAAAIAAAAA"}
    assert find_spec("httptools"), "uvicorn's other parser, which loses it, would be taken if it were left to uvicorn"
    response = served.http.post("/v1/completions", json={"prompt": "abc"}, headers=offer)
    assert response.status_code == 200
    assert "upgrade" not in capfd.readouterr().err


def test_while_requests_wait_for_a_row_the_news_of_some_rounds_go_out_together(
    small: Served, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stepper, "MERGED_SECONDS", 3600)
    found: list[httpx.Response] = []
    with small.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        waiting = in_thread(small, LONG, found)
        until(lambda: len(small.service.stepper.tickets) == 2)
        gate.let(10_000)
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    waiting.join(60)
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(choice["text"] for choice in choices) == found[0].json()["choices"][0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None, None, "length"], "all but the first, at the end"


def test_no_news_wait_for_a_further_round(small: Served, gate: Gate):
    """The first token's neither, which comes out in the same step as the first round."""
    small.service.keep_alive_seconds = 1000  # which would look for news, too
    with small.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        waiting = in_thread(small, LONG, [])
        until(lambda: len(small.service.stepper.tickets) == 2)
        for _ in range(3):
            gate.let(1)
            next(lines)
        gate.let(10_000)
    waiting.join(60)


def test_a_client_that_leaves_a_stream_frees_its_row_within_a_round(small: Served, gate: Gate):
    with small.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        gate.let(2)
        next(response.iter_lines())
        [ticket] = small.service.stepper.tickets
    until(lambda: ticket.request.cancelled)
    gate.let(1)
    until(lambda: not small.service.stepper.tickets)
    assert ticket.request.finish_reason == "cancelled"
    until(lambda: not small.decoder.live)
    assert small.decoder.cache_usage == 0


def test_a_client_that_leaves_before_a_whole_answer_frees_its_row_too(small: Served, gate: Gate):
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{small.url}/v1/completions", json=LONG, timeout=httpx.Timeout(60, read=0.3))
    until(lambda: all(ticket.request.cancelled for ticket in small.service.stepper.tickets))
    gate.let(1)
    until(lambda: not small.service.stepper.tickets)


def test_a_full_queue_answers_503_and_says_when_to_come_back(small: Served, gate: Gate):
    found: list[httpx.Response] = []
    threads = [in_thread(small, LONG, found) for _ in range(2)]
    until(lambda: len(small.service.stepper.tickets) == 2)
    assert (metric(small, "num_requests_running"), metric(small, "num_requests_waiting")) == (1, 1)
    response = small.post("/v1/completions", LONG)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert response.json()["error"]["code"] == "queue_full"
    assert response.json()["error"]["message"].startswith("2 requests are live or waiting, this server takes 2;")
    too_many = small.post("/v1/completions", LONG | {"n": 3})
    assert too_many.status_code == 400
    assert "3 completions are asked for, this server takes 2 at once" in too_many.json()["error"]["message"]
    gate.let(10_000)
    for thread in threads:
        thread.join()
    assert [response.status_code for response in found] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_round_ends_its_requests_with_an_error_of_their_own_and_the_next_goes_on(
    small: Served, gate: Gate, alone: Decoder, stream: bool
):
    gate.fails = True
    gate.let(1)
    with pytest.raises(openai.APIError) as error:
        list(small.openai.completions.create(model="tiny", prompt="abc", stream=stream))
    assert "a round failed (RuntimeError: the engine failed) after 0 tokens of this request" in str(error.value)
    assert error.value.code == "engine_error"
    if not stream:
        assert error.value.status_code == 500
    gate.fails = False
    gate.let(10_000)
    [expected] = alone.generate("abc", SamplingParams(max_new_tokens=9))
    answer = small.openai.completions.create(model="tiny", prompt="abc", max_tokens=9, temperature=0)
    assert answer.choices[0].text == expected.text


def test_rounds_that_go_on_failing_neither_fill_the_log_nor_keep_the_server(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
):
    failed = []

    def fail(decoder: Decoder) -> bool:
        failed.append(decoder)
        raise RuntimeError("it fails")

    with serving(llama, drain_seconds=0) as server:
        monkeypatch.setattr(Decoder, "step", fail)
        server.service.stepper._work.set()
        time.sleep(0.5)
        assert 1 <= failed.count(server.decoder) <= 12
        assert server.http.get("/health").status_code == 200


def test_an_error_in_mid_stream_follows_what_came_and_no_done_follows_it(small: Served, gate: Gate):
    with small.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        gate.let(2)  # the token that comes with the prompt may be half a letter
        assert '"choices"' in next(lines)
        gate.fails = True
        gate.let(1)
        rest = [line for line in lines if line]
    assert rest[-1].startswith('data: {"error":{"message":"a round failed (RuntimeError: the engine failed)')
    assert not any("[DONE]" in line for line in rest)


def test_a_stream_without_news_is_kept_alive(small: Served, gate: Gate):
    small.service.keep_alive_seconds = 0.01
    with small.http.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines) == ": keep-alive"
        gate.let(10_000)
        assert [line for line in lines if line][-1] == "data: [DONE]"


def test_a_stream_whose_text_is_held_back_is_kept_alive(small: Served, gate: Gate):
    """Each round brings news, none of which may be shown: all of the text begins the stop string."""
    small.service.keep_alive_seconds = 0.05
    [letter] = small.decoder.tokenizer.encode("a").ids
    body = LONG | {"logit_bias": {str(letter): 100}, "stop": "a" * 300 + "b", "draft_length": 0, "stream": True}
    seen = threading.Event()

    def let_rounds() -> None:
        while not seen.wait(0.01):
            gate.let(1)

    thread = threading.Thread(target=let_rounds)
    thread.start()
    try:
        with small.http.stream("POST", "/v1/completions", json=body) as response:
            assert next(response.iter_lines()) == ": keep-alive"
    finally:
        seen.set()
        thread.join()


def test_a_drain_finishes_what_runs_and_takes_nothing_new(small: Served, gate: Gate):
    found: list[httpx.Response] = []
    threads = [in_thread(small, LONG, found) for _ in range(2)]
    until(lambda: len(small.service.stepper.tickets) == 2)
    small.end()
    until(lambda: small.service.stepper.draining)
    ready = small.http.get("/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
    assert small.http.get("/health").status_code == 200
    response = small.post("/v1/completions", LONG)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")
    assert response.headers["retry-after"] == "1"
    gate.let(10_000)
    for thread in threads:
        thread.join()
    assert [response.json()["usage"]["completion_tokens"] for response in found] == [200, 200]


def test_what_has_not_finished_in_time_is_ended_with_an_error(llama: Pair, gate: Gate):
    found: list[httpx.Response] = []
    with serving(llama, max_batch=1, drain_seconds=0.1) as server:
        threads = [in_thread(server, LONG, found) for _ in range(2)]
        until(lambda: len(server.service.stepper.tickets) == 2)
        server.end()
        until(lambda: all(ticket.request.cancelled for ticket in server.service.stepper.tickets))
        gate.let(10_000)
        for thread in threads:
            thread.join()
    assert [response.status_code for response in found] == [503, 503]
    assert {response.json()["error"]["code"] for response in found} == {"shutting_down"}


def test_what_is_loaded_before_serving_is_not_looked_through_for_garbage_again(monkeypatch: pytest.MonkeyPatch):
    frozen = []

    def note_and_end(serving: Coroutine[Any, Any, None]) -> None:
        frozen.append(gc.get_freeze_count())
        serving.close()

    monkeypatch.setitem(serve.__globals__, "run_loop", note_and_end)  # also where another test has reloaded modules
    try:
        service = Mock(stepper=Mock(error=None, state="dead"))
        serve(Mock(), service, Mock(), drain_seconds=0, announce=Mock())
    finally:
        gc.unfreeze()
    assert frozen[0] > 10_000
