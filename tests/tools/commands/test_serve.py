"""`trt-spec serve` and `trt-spec chat` as users start them."""

import gzip
import json
import logging
import os
import re
import select
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import trustme
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from trt_spec.engines import Bundle, ExportError, RequestError
from trt_spec.export import pipeline
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.commands import chat as chat_command
from trt_spec.tools.commands import serve as serve_command
from trt_spec.tools.ink import DIM, Ink
from trt_spec.tools.making import kept_bundles
from trt_spec.tools.serving.keys import Keys
from trt_spec.tools.serving.tracing import CLOSE_SECONDS
from trt_spec.tools.trace_lines import RESET

from ...kit.bundles import Pair
from ...kit.terminal import Terminal
from ...kit.waiting import until
from ..conftest import assert_refused

LONG = {"prompt": "abc", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def logging_as_it_was():
    """A server that is started here, and refused, has set up its log."""
    loggers = [logging.getLogger(name) for name in ("trt_spec", "uvicorn")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    file = tmp_path / "template.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}1{% endfor %}")
    return file


@pytest.fixture
def start(llama: Pair, template: Path):
    """`start(…)` starts a server and gives its process, its address, and the line it printed."""
    started = []

    def start(*arguments: object) -> tuple[subprocess.Popen[str], str, str]:
        code = "import sys; from trt_spec.tools.cli import main; sys.exit(main(sys.argv[1:]))"
        command = ["serve", "--bundle", llama.bundle, "--port", 0, "--chat-template", template, *arguments]
        process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, command)], stderr=subprocess.PIPE, text=True, env=os.environ
        )
        started.append(process)
        line = process.stderr.readline()
        return process, re.search(r"https?://\S+", line)[0], line

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def test_it_says_where_it_listens_and_sigterm_finishes_what_runs(start, llama: Pair, tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("# of the gateway\nfirst\n\n # of the tests\nsecond\n")
    process, url, line = start("--api-key-file", keys, "--max-batch", 2, "--served-model-name", "mine")
    assert re.fullmatch(r"trt-spec serves mine with onnxruntime on cpu at http://127\.0\.0\.1:\d+\n", line)
    headers = {"authorization": "Bearer second"}
    for key in ("", "# of the gateway", "#"):
        assert httpx.get(f"{url}/v1/models", headers={"x-api-key": key}).status_code == 401
    assert httpx.get(f"{url}/v1/models").status_code == 401
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert process.wait(60) == 0
    log = process.stderr.read()
    assert "path=/v1/completions status=200" in log
    assert "draining" in log


@pytest.mark.parametrize(("drafter", "shipped"), [("eagle3", "eagle3"), ("suffix", "model")])
def test_the_shipped_pair_is_served_with_the_draft_that_is_asked_for(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafter: str, shipped: str
):
    asked = []

    def refused(target, out, draft, *_, **__):
        asked.append((target, draft))
        raise ExportError("nothing is made here")  # or it would serve until somebody ends it

    monkeypatch.setattr(pipeline, "export_bundle", refused)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run("serve", "--drafter", drafter, "--port", 0).code == 2
    assert asked == [(kept_bundles.TARGET, [kept_bundles.DEMO_DRAFTS[shipped]])]


def test_what_requests_leave_open_is_as_the_flags_say(start, llama: Pair, tmp_path: Path):
    opened = Bundle.open(shutil.copytree(llama.bundle, tmp_path / "bundle"))
    recommended = replace(opened.tokenizer, sampling={"temperature": 0.0, "repetition_penalty": 1.3})
    replace(opened, tokenizer=recommended).save()
    with Decoder.open(llama.bundle) as decoder:
        greedy = SamplingParams(max_new_tokens=20, repetition_penalty=1.3)
        sampled = SamplingParams(max_new_tokens=20, temperature=1.0, rule="coupled", seed=5)
        expected, other = ([one.text for one in decoder.generate("abc", one)] for one in (greedy, sampled))
    _, url, _ = start("--bundle", opened.path, "--generation-config", "--rule", "coupled", "--max-model-len", 64)

    def texts(path: str, **fields: object) -> dict:
        return httpx.post(f"{url}{path}", json={"seed": 5, **fields}, timeout=60).json()

    assert [one["text"] for one in texts("/v1/completions", prompt="abc", max_tokens=20)["choices"]] == expected
    more = {"temperature": 1, "repetition_penalty": 1, "draft_length": 2}
    assert [one["text"] for one in texts("/v1/completions", prompt="abc", max_tokens=20, **more)["choices"]] == other
    response = httpx.post(f"{url}/v1/responses", json={"input": "abc", "max_output_tokens": 9}, timeout=60).json()
    assert (response["temperature"], response["top_p"]) == (0.0, 1.0)
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 64
    assert "the model takes 64 together" in texts("/v1/completions", prompt="abc", max_tokens=64)["error"]["message"]


def test_defaults_that_no_request_could_have_are_refused_at_once(run, llama: Pair, tmp_path: Path):
    opened = Bundle.open(shutil.copytree(llama.bundle, tmp_path / "bundle"))
    replace(opened, tokenizer=replace(opened.tokenizer, sampling={"top_p": 7.0})).save()
    assert_refused(run("serve", "--bundle", opened.path, "--generation-config"), "top_p is 7.0, expected")


def test_keys_come_from_flags_and_from_a_file(start, tmp_path: Path):
    (tmp_path / "keys").write_text("third\n")
    _, url, _ = start("--api-key", "first", "--api-key", "second", "--api-key-file", tmp_path / "keys")
    for key, status in (("first", 200), ("second", 200), ("third", 200), ("fourth", 401)):
        assert httpx.get(f"{url}/v1/models", headers={"authorization": f"Bearer {key}"}).status_code == status


def test_sighup_reads_keys_and_certificates_again_and_keeps_them_where_that_fails(start, tmp_path: Path):
    keys, pem = tmp_path / "keys", tmp_path / "both.pem"
    authorities = [trustme.CA(), trustme.CA()]
    contexts = [ssl.create_default_context() for _ in authorities]
    for authority, context in zip(authorities, contexts, strict=True):
        authority.configure_trust(context)

    def issue(authority: trustme.CA) -> None:
        pem.write_bytes(authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.bytes())

    def answer(key: str, context: ssl.SSLContext) -> int | None:
        try:
            return httpx.get(f"{url}/v1/models", headers={"x-api-key": key}, verify=context).status_code
        except httpx.ConnectError:
            return None

    keys.write_text("first\n")
    issue(authorities[0])
    process, url, _ = start("--api-key-file", keys, "--api-key", "lasting", "--ssl-certfile", pem)
    assert (answer("first", contexts[0]), answer("second", contexts[0])) == (200, 401)
    keys.write_text("second\n")
    issue(authorities[1])
    process.send_signal(signal.SIGHUP)
    until(lambda: answer("second", contexts[1]) == 200)
    assert (answer("first", contexts[1]), answer("lasting", contexts[1])) == (401, 200)
    assert answer("second", contexts[0]) is None
    for file in (keys, pem):
        content = file.read_bytes()
        file.write_text("# nothing\n")
        process.send_signal(signal.SIGHUP)
        assert "keys and certificates stay as they were: " in next(
            line for line in process.stderr if "certificates" in line and "again" not in line
        )
        file.write_bytes(content)
    assert answer("second", contexts[1]) == 200


def test_metrics_have_a_port_of_their_own_that_needs_no_key(start):
    _, url, line = start("--api-key", "secret", "--metrics-port", 0)
    apart = re.search(r"metrics at (http://\S+)", line)[1]
    assert httpx.get(f"{apart}/metrics").text.startswith("# HELP vllm:")
    assert [httpx.get(f"{apart}{path}").status_code for path in ("/health", "/ready", "/v1/models")] == [200, 200, 404]
    assert httpx.get(f"{url}/metrics", headers={"x-api-key": "secret"}).status_code == 404


def test_sighup_ends_a_server_that_has_no_file_to_read_again(start):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it
    process, _, _ = start("--api-key", "secret")
    signal.signal(signal.SIGHUP, before)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == -signal.SIGHUP


def test_sighup_reads_files_again_while_the_model_loads(run, llama: Pair, tmp_path: Path, monkeypatch):
    keys, before, seen = tmp_path / "keys", signal.getsignal(signal.SIGHUP), []
    keys.write_text("first\n")

    def load(path: Path) -> Bundle:
        keys.write_text("second\n")
        signal.raise_signal(signal.SIGHUP)
        raise RequestError("nothing is served here")

    def noting(self: Keys) -> None:
        read_again(self)
        seen.append((self.caller(b"first"), self.caller(b"second") is not None))

    read_again = Keys.read_again
    monkeypatch.setattr(Keys, "read_again", noting)
    monkeypatch.setattr(Bundle, "open", load)
    assert_refused(run("serve", "--bundle", llama.bundle, "--api-key-file", keys), "nothing is served here")
    assert seen == [(None, True)]
    assert signal.getsignal(signal.SIGHUP) is before


def test_traces_go_where_the_variables_of_opentelemetry_say(start, monkeypatch: pytest.MonkeyPatch):
    sent = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            body = gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body
            sent.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *said: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        process, url, _ = start()
        assert httpx.post(f"{url}/v1/completions", json=LONG, timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        collector.shutdown()
    [(path, one)] = sent
    [resource] = one.resource_spans
    attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
    assert path == "/v1/traces"
    assert (attributes["service.name"], attributes["deployment.environment.name"]) == ("trt-spec", "test")
    names = [span.name for scope in resource.scope_spans for span in scope.spans]
    assert sorted(names) == ["POST /v1/completions", "prefill", "queue", "rounds"]


@pytest.mark.exhaustive
def test_a_collector_that_never_answers_keeps_neither_answers_nor_the_end(start, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as nobody:  # it takes what comes, and never answers
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        process, url, _ = start("--log-format", "json")
        assert httpx.post(f"{url}/v1/completions", json=LONG, timeout=60).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(2 * CLOSE_SECONDS) == 0, "not the 10 s that the exporter waits, and tries again"
    assert [line for line in process.stderr if not line.startswith("{")] == []


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/json', expected one of"),
        ("OTEL_TRACES_EXPORTER", "zipkin", "traces are to go out by zipkin, which is not installed; install its"),
    ],
)
def test_traces_that_cannot_go_out_are_refused_at_start(run, llama: Pair, monkeypatch, variable, value, said):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(variable, value)
    assert_refused(run("serve", "--bundle", llama.bundle, "--port", 0), said)


def test_traces_that_are_asked_for_name_the_extra_that_they_need(run, llama: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "trt_spec.tools.serving.tracing", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
    refused = run("serve", "--bundle", llama.bundle, "--port", 0)
    assert_refused(refused, "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT asks for traces, which need opentelemetry.sdk.trace")
    assert "pip install 'trt-spec[otel]'" in refused.err


@pytest.mark.parametrize("variables", [{}, {"OTEL_TRACES_EXPORTER": "none"}, {"OTEL_SDK_DISABLED": "true"}])
def test_where_no_traces_are_asked_for_nothing_is_made(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]):
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    if variables:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "trt_spec.tools.serving.tracing", None)
    assert serve_command._traces() is None


@pytest.mark.parametrize("flag", ["api-key", "api-key-file", "ssl-certfile"])
def test_what_protects_is_never_empty_wherever_it_is_set(
    run, llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
):
    """An empty variable says nothing elsewhere; here the server would let everybody in, and nobody would know."""
    for value in ('""', "", "[]"):
        (tmp_path / "server.yaml").write_text(f"{flag}: {value}\n")
        refused = run("serve", "--bundle", llama.bundle, "--config", tmp_path / "server.yaml", "--port", "0")
        assert_refused(refused, f"argument --{flag}: it is empty, so that nothing would be protected;")
    variable = f"TRT_SPEC_{flag.upper().replace('-', '_')}"
    monkeypatch.setenv(variable, "")
    refused = run("serve", "--bundle", llama.bundle, "--port", "0")
    assert_refused(refused, f"argument --{flag}: it is empty")
    assert f"(set by {variable})" in refused.err


@pytest.mark.parametrize("together", [True, False])
def test_it_serves_https_and_its_metrics_too(start, tmp_path: Path, together: bool):
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    apart = ("--ssl-certfile", tmp_path / "cert.pem", "--ssl-keyfile", tmp_path / "key.pem")
    given = ("--ssl-certfile", tmp_path / "both.pem") if together else apart
    process, url, line = start(*given, "--metrics-port", 0)
    metrics = re.search(r"metrics at (https://\S+)", line)[1]
    assert url.startswith("https://127.0.0.1:")
    trusted = ssl.create_default_context()
    authority.configure_trust(trusted)
    with httpx.Client(base_url=url, verify=trusted, timeout=60) as client:
        text = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
            chunks = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    assert httpx.get(f"{metrics}/metrics", verify=trusted).text.startswith("# HELP vllm:")
    for one in (url, metrics):
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(f"{one}/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{one.replace('https', 'http')}/health")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


def test_a_full_disk_behind_its_log_does_not_keep_it_from_serving(llama: Pair):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "trt_spec.tools.cli", "serve", "--bundle", str(llama.bundle), "--port", str(port)]
    with open("/dev/full", "w", encoding="utf-8") as full, subprocess.Popen(command, stderr=full) as process:
        try:
            until(lambda: answers(port) or process.poll() is not None)
            assert httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=LONG).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200
    except httpx.TransportError:
        return False


def test_a_second_signal_does_not_wait(start):
    process, _, _ = start("--drain-seconds", 600)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "65536"], "argument --port: '65536', expected a number from 0 to 65535"),
        (["--cache-memory", "lots"], "argument --cache-memory: 'lots', expected a size like 500MB or 2GiB"),
        (["--drain-seconds", "-1"], "argument --drain-seconds"),
        (["other"], "both name the model; leave one out"),
        (["--draft", "other"], "--draft is for checkpoints, but a bundle is served; leave it out"),
        (["--revision", "main"], "--revision is for checkpoints, but a bundle is served"),
        (["--max-model-len", "4096"], "sequences of 4096 tokens are asked for, the models allow"),
        (["--generation-config"], "keeps no defaults of a generation_config.json"),
        (["--ssl-keyfile", "KEY"], "--ssl-keyfile is the key of --ssl-certfile, which is missing; give both"),
        (["--ssl-certfile", "BROKEN"], "BROKEN is no certificate and its key ("),
        (["--host", "203.0.113.7"], "cannot listen on 203.0.113.7 port 8000 ("),
        (["--api-key", ""], "argument --api-key: it is empty, so that nothing would be protected; give a value"),
        (["--api-key", "key", "--api-key", " "], "argument --api-key: it is empty"),
        (["--ssl-certfile", ""], "argument --ssl-certfile: it is empty"),
        (["--rows-per-key", "2"], "--requests-per-minute and --rows-per-key bound each key, but there is none"),
        (["--api-key-file", "EMPTY"], "holds no key; put one on each line, or leave --api-key-file out"),
        (["--served-model-name", ""], "argument --served-model-name: it is empty; give a value, or leave it out"),
        (["--allow-origin", " "], "argument --allow-origin: it is empty"),
        (["--drafter", "eagle3", "--port", "0"], "the bundle has no eagle3 head; export one with --draft"),
        (["--drafter", "model2", "--port", "0"], "the bundle has no draft2, which drafter model2 runs"),
        (["--drafter", "lookup", "--draft-length", "4/12", "--port", "0"], "drafter lookup can grow no tree here"),
        (["--chat-template", "BROKEN", "--port", "0"], "the chat template is not one ("),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(run, llama: Pair, tmp_path: Path, arguments: list, message: str):
    (tmp_path / "EMPTY").write_text("\n# none yet\n")
    (tmp_path / "BROKEN").write_text("{% for %}")
    arguments = [str(tmp_path / one) if one in ("EMPTY", "BROKEN") else one for one in arguments]
    assert_refused(run("serve", "--bundle", llama.bundle, *arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api-key-file", "/none"], "--api-key-file /none cannot be read"),
        (["--ssl-certfile", "/none"], "/none is no certificate and its key ("),
        (["--chat-template", "/none"], "chat template /none cannot be read"),
        (["--rows-per-key", "2"], "bound each key, but there is none"),
    ],
)
def test_what_is_wrong_with_flags_and_files_is_told_before_anything_heavy_is_loaded(
    run, llama: Pair, monkeypatch: pytest.MonkeyPatch, arguments: list, message: str
):
    for name in [name for name in sys.modules if name.startswith("trt_spec.tools.serving")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("msgspec", "starlette", "uvicorn", "prometheus_client", "trt_spec.tools.serving.service"):
        monkeypatch.setitem(sys.modules, name, None)
    assert_refused(run("serve", "--bundle", llama.bundle, *arguments), message)


def test_a_missing_library_is_named_with_the_extra_that_has_it(
    run, llama: Pair, template: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in sys.modules if name.startswith("trt_spec.tools.serving")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    result = run("chat", "--bundle", llama.bundle, "--chat-template", template)
    assert_refused(result, "chat needs jinja2, which is not installed; pip install 'trt-spec[serve]'")


def test_a_chat_in_the_terminal_needs_no_library_of_the_server(
    run, llama: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in [name for name in sys.modules if name.startswith("trt_spec.tools.serving")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("msgspec", "starlette", "uvicorn", "prometheus_client"):
        monkeypatch.setitem(sys.modules, name, None)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[-1]['content'] }}")
    asked = ("--chat", "--chat-template", template, "--prompt", "abc", "--max-new-tokens", 3)
    assert run("generate", "--bundle", llama.bundle, *asked).code == 0


def test_chat_answers_line_by_line_and_remembers_the_conversation(
    run, llama: Pair, template: Path, monkeypatch: pytest.MonkeyPatch
):
    def answer(decoder: Decoder, written: str) -> str:
        ids = decoder.tokenizer.encode(written, add_special_tokens=False).ids
        [output] = decoder.generate([ids], SamplingParams(max_new_tokens=9, ignore_eos=True))
        return output.text

    with Decoder.open(llama.bundle) as decoder:
        first = answer(decoder, "abc1")
        second = answer(decoder, f"abc1{first}1xyz1")
    monkeypatch.setattr(chat_command.sys, "stdin", Terminal("abc\n\nxyz\n"))
    asked = ("--temperature", 0, "--max-new-tokens", 9, "--ignore-eos", "--chat-template", template)
    result = run("chat", "--bundle", llama.bundle, *asked)
    assert result.code == 0
    assert result.out == f"{first}\n{second}\n"
    assert result.err.count(" tokens/s; ") == 2
    assert result.err.startswith("> ")


def test_chat_does_not_read_the_conversation_anew(run, llama: Pair, template: Path, monkeypatch: pytest.MonkeyPatch):
    found, close = [], Decoder.close

    def note(decoder: Decoder) -> None:
        found.append((decoder.prefixes.found_tokens, decoder.prefixes.asked_tokens))
        close(decoder)

    monkeypatch.setattr(Decoder, "close", note)
    monkeypatch.setattr(chat_command.sys, "stdin", Terminal("a b c d " * 12 + "\nxyz\n"))
    asked = ("--temperature", 0, "--max-new-tokens", 9, "--ignore-eos", "--chat-template", template)
    assert run("chat", "--bundle", llama.bundle, *asked).code == 0
    [(kept, read)] = found
    assert 0.25 * read < kept < 0.5 * read, "of two prompts, the second begins with the first"


def test_what_is_typed_during_an_answer_is_neither_shown_nor_asked(monkeypatch: pytest.MonkeyPatch):
    screen, keys = os.openpty()
    with os.fdopen(keys) as stdin, os.fdopen(screen, "rb", 0) as shown:
        monkeypatch.setattr(chat_command.sys, "stdin", stdin)
        with chat_command._no_typing():
            os.write(screen, b"too early\n")
            assert select.select([stdin], [], [], 30)[0], "it has come through"
        os.write(screen, b"asked\n")
        assert stdin.readline() == "asked\n"
        assert shown.read(100) == b"asked\r\n"


def test_chat_without_a_template_is_refused(run, llama: Pair):
    assert_refused(run("chat", "--bundle", llama.bundle), "has no chat template; give one with --chat-template FILE")


def test_on_a_terminal_the_drafts_text_is_dimmed_and_the_targets_is_not(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    with Decoder.open(llama.bundle) as decoder:
        pieces = list(decoder.stream("abc", SamplingParams(max_new_tokens=40), draft_length=4))
        screen = Terminal()
        ink = Ink(screen, decoder.tokenizer)
        for piece in pieces:
            ink.write(piece)
        drafted = [t for piece in pieces for t, own in zip(piece.token_ids, piece.from_draft, strict=True) if own]
        dimmed = "".join(re.findall(re.escape(DIM) + "(.*?)" + re.escape(RESET), screen.getvalue(), re.DOTALL))
        assert dimmed == decoder.tokenizer.decode(drafted)
    assert screen.getvalue().replace(DIM, "").replace(RESET, "") == "".join(piece.text for piece in pieces)
    assert 0 < len(drafted) < 40
