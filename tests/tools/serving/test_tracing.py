"""Traces say under which request of a client a text was written, and what it waited for, read and wrote."""

import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from trt_spec.tools.serving.tracing import Traces

from ...kit.bundles import Pair
from ...kit.waiting import until
from .conftest import Gate, Served, serving

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
BODY = {"prompt": "secret", "max_tokens": 12, "temperature": 0, "draft_length": 4, "speculation": True}


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture(scope="module")
def traced(llama: Pair, exporter: InMemorySpanExporter) -> Iterator[Served]:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with serving(llama, traces=Traces(provider)) as server:
        yield server


@pytest.fixture(autouse=True)
def forgotten(exporter: InMemorySpanExporter) -> None:
    exporter.clear()


def spans(exporter: InMemorySpanExporter, server: str) -> tuple[ReadableSpan, list[ReadableSpan]]:
    """The span of the one request, once it has ended, and those within it in the order of their beginnings."""
    until(lambda: any(one.name == server for one in exporter.get_finished_spans()))
    found = exporter.get_finished_spans()
    [request] = [one for one in found if one.kind is SpanKind.SERVER]
    inside = [one for one in found if one is not request]
    assert request.name == server
    assert {one.parent.span_id for one in inside} <= {request.context.span_id}
    return request, sorted(inside, key=lambda one: one.start_time)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_of_its_clients_trace_and_has_three_within(
    traced: Served, exporter: InMemorySpanExporter, stream: bool
):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    answer = traced.http.post("/v1/completions", json=BODY | {"stream": stream}, headers=headers)
    last = answer.text.split("data: ")[-2] if stream else answer.text
    counts = json.loads(last)["choices"][0]["speculation"]
    request, (queue, prefill, rounds) = spans(exporter, "POST /v1/completions")
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    assert request.attributes["http.response.status_code"] == 200
    assert [one.name for one in (queue, prefill, rounds)] == ["queue", "prefill", "rounds"]
    assert queue.start_time <= queue.end_time == prefill.start_time < prefill.end_time == rounds.start_time
    assert request.start_time < queue.start_time
    assert rounds.start_time < rounds.end_time < request.end_time
    assert dict(prefill.attributes) == {"gen_ai.usage.input_tokens": 6, "trt_spec.cached_tokens": 0}
    assert dict(rounds.attributes) == {
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.response.finish_reasons": ("length",),
        "trt_spec.drafter": "model",
        "trt_spec.rounds": counts["rounds"],
        "trt_spec.proposed_tokens": counts["proposed"],
        "trt_spec.accepted_tokens": counts["accepted"],
    }
    assert "secret" not in "".join(one.to_json() for one in exporter.get_finished_spans())


def test_each_text_of_a_request_has_its_spans(traced: Served, exporter: InMemorySpanExporter):
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3, "n": 3}
    assert traced.post("/v1/chat/completions", body).status_code == 200
    request, inside = spans(exporter, "POST /v1/chat/completions")
    assert request.parent is None
    assert sorted(one.name for one in inside) == sorted(["queue", "prefill", "rounds"] * 3)


def test_what_the_client_does_not_want_traced_is_not(traced: Served, exporter: InMemorySpanExporter):
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert traced.http.post("/v1/completions", json=BODY, headers=headers).status_code == 200
    traced.http.get("/health")
    traced.http.get("/metrics")
    traced.http.get("/v1/models/tiny")
    request, inside = spans(exporter, "GET /v1/models/{model}")
    assert inside == []
    assert request.attributes["url.path"] == "/v1/models/tiny"


def test_refusals_and_failures_are_told_apart(
    traced: Served, exporter: InMemorySpanExporter, gate: Gate, caplog: pytest.LogCaptureFixture
):
    traced.post("/v1/completions", {"functions": []})
    request, inside = spans(exporter, "POST /v1/completions")
    assert (request.attributes["http.response.status_code"], request.status.status_code) == (400, StatusCode.UNSET)
    assert inside == []
    exporter.clear()
    gate.fails = True
    gate.let(1)
    assert traced.post("/v1/completions", BODY).status_code == 500
    request, [failed] = spans(exporter, "POST /v1/completions")
    assert request.status.status_code is failed.status.status_code is StatusCode.ERROR
    assert failed.name == "failed"
    assert "the engine failed" in failed.status.description


def test_the_log_names_the_trace(traced: Served, exporter: InMemorySpanExporter):
    fields, handler = [], logging.Handler()
    handler.emit = lambda record: fields.append(record.fields)
    logger = logging.getLogger("trt_spec.access")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        traced.http.get("/v1/models")
        request, _ = spans(exporter, "GET /v1/models")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert [one["trace"] for one in fields] == [f"{request.context.trace_id:032x}"]
