"""What is seen from outside: models, tokens, metrics, request ids, and a log that keeps prompts to itself."""

import io
import json
import logging
import re
from pathlib import Path

import pytest
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.serving import metrics
from trt_spec.tools.serving.access_log import JsonForm, TextForm

from ...kit.bundles import Pair
from .conftest import Served, serving

BODY = {"prompt": "secret", "max_tokens": 12, "temperature": 0, "draft_length": 4}
VLLM = (
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "time_to_first_token_seconds_count",
    "inter_token_latency_seconds_count",
    "request_time_per_output_token_seconds_count",
    "request_queue_time_seconds_count",
    "e2e_request_latency_seconds_count",
    "prompt_tokens_total",
    "generation_tokens_total",
)


def values(served: Served) -> dict[str, float]:
    lines = served.http.get("/metrics").text.splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line.startswith("vllm:"))
    return {re.sub(r',?model_name="tiny",?', "", name.removeprefix("vllm:")): float(value) for name, value in pairs}


def test_models_are_listed_and_described(served: Served):
    [model] = served.openai.models.list().data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("tiny", "model", "trt-spec", 256)
    assert served.openai.models.retrieve("tiny") == model


def test_tokens_of_a_prompt_and_back(served: Served, alone: Decoder):
    found = served.post("/tokenize", {"prompt": "abc", "return_token_strs": True}).json()
    ids = alone.tokenizer.encode("abc").ids
    assert found == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": ["a", "b", "c"]}
    assert served.post("/detokenize", {"tokens": ids}).json() == {"prompt": "abc"}


def test_metrics_count_under_the_names_that_dashboards_know(llama: Pair, alone: Decoder):
    [expected] = alone.generate("secret", SamplingParams(max_new_tokens=12), draft_length=4)
    with serving(llama) as server:
        for stream in (False, True):
            assert server.post("/v1/completions", BODY | {"stream": stream}).status_code == 200
        found = values(server)
    missing = [name for name in VLLM if f"{name}{{}}" not in found]
    assert missing == []
    assert found["generation_tokens_total{}"] == 24
    assert found["prompt_tokens_total{}"] == 2 * expected.usage.prompt_tokens
    assert found["spec_decode_num_draft_tokens_total{}"] == 2 * expected.speculation.proposed
    assert found["spec_decode_num_accepted_tokens_total{}"] == 2 * expected.speculation.accepted
    at = [found[f'spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}}'] for place in range(4)]
    assert at == [2 * count for count in expected.speculation.accepted_at]
    for name in ("time_to_first_token", "request_time_per_output_token", "request_queue_time", "e2e_request_latency"):
        assert found[f"{name}_seconds_count{{}}"] == 2
    assert found['request_success_total{finished_reason="length"}'] == 2
    assert found["kv_cache_usage_perc{}"] == 0
    assert 0 < found["inter_token_latency_seconds_count{}"] < 12, "chunks, which hold several tokens"


def test_answers_are_counted_by_path_and_status_whatever_clients_make_up(llama: Pair):
    with serving(llama) as server:
        for body in (BODY, BODY, {"functions": []}):
            server.post("/v1/completions", body)
        for number in range(3):
            server.http.request("BREW", f"/made/up/{number}")
            server.http.get(f"/v1/responses/{number}")
        lines = server.http.get("/metrics").text.splitlines()
    counted = {line for line in lines if line.startswith("trt_spec:http_requests_total")}
    start = "trt_spec:http_requests_total{method="
    assert counted == {
        f'{start}"POST",path="/v1/completions",status="200"}} 2.0',
        f'{start}"POST",path="/v1/completions",status="400"}} 1.0',
        f'{start}"GET",path="/v1/responses/{{response_id}}",status="404"}} 3.0',
        f'{start}"other",path="other",status="404"}} 3.0',
    }


def test_the_dashboard_asks_for_nothing_that_is_not_counted(served: Served):
    served.post("/v1/completions", BODY)
    text = (Path(metrics.__file__).parent / "deploy" / "grafana.json").read_text()
    asked = set(re.findall(r"vllm:\w+", text))
    assert len(asked) > 10
    known = {line.split("{")[0] for line in served.http.get("/metrics").text.splitlines() if line.startswith("vllm:")}
    assert asked - known == set()
    assert json.loads(text)["title"] == "trt-spec"


@pytest.fixture
def logged():
    """`logged(form)` collects what the access log writes from now on."""
    logger, handlers = logging.getLogger("trt_spec.access"), []

    def collect(form: logging.Formatter) -> io.StringIO:
        handler = logging.StreamHandler(io.StringIO())
        handler.setFormatter(form)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        handlers.append(handler)
        return handler.stream

    yield collect
    for handler in handlers:
        logger.removeHandler(handler)


@pytest.mark.parametrize("prompts", [False, True])
def test_each_request_is_one_line_and_prompts_stay_out_unless_asked_for(llama: Pair, logged, prompts: bool):
    text, lines = logged(TextForm()), logged(JsonForm())
    with serving(llama, log_prompts=prompts) as server:
        server.http.post("/v1/completions", json=BODY, headers={"x-request-id": "mine-1"})
        server.http.get("/health")
        server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "secret"}], "functions": []})
        server.http.get("/v1/%0d%0aforged")
    first, refused, forged = map(json.loads, lines.getvalue().splitlines())
    assert {name: first[name] for name in ("id", "method", "path", "status", "prompt_tokens", "completion_tokens")} == {
        "id": "mine-1", "method": "POST", "path": "/v1/completions", "status": 200, "prompt_tokens": 6,
        "completion_tokens": 12,
    }  # fmt: skip
    assert (first["finish"], first["level"]) == ("length", "info")
    assert (refused["status"], refused["error"]) == (400, "unsupported_parameter")
    assert forged["path"] == "/v1/\r\nforged"
    assert len(text.getvalue().splitlines()) == 3
    stamp = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}"
    assert re.fullmatch(stamp, first["time"])
    assert re.match(f"{stamp} INFO request ", text.getvalue())
    assert ("secret" in lines.getvalue()) == ("secret" in text.getvalue()) == prompts
    assert first.get("prompt") == ("secret" if prompts else None)


def test_a_request_id_comes_back_and_a_strange_one_does_not(served: Served):
    given = served.http.get("/health", headers={"x-request-id": "abc-1"})
    assert given.headers["x-request-id"] == "abc-1"
    for strange in ("a b", "x" * 200, "", "é".encode()):
        made = served.http.get("/health", headers={"x-request-id": strange}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{24}", made)
