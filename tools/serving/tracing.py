"""Traces for OpenTelemetry: a span for each request, and in it what each of its texts waited for, read and wrote.

Its own environment variables say where they go; nothing here is imported where they ask for none.
"""

import os
import threading
import time
from collections.abc import Callable
from importlib.metadata import entry_points, version

from opentelemetry import trace
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue
from starlette.types import ASGIApp, Receive, Scope, Send

from ...engines import RequestError, TrtSpecError
from .access_log import NOTES, QUIET
from .errors import MOST_NAMED, shortened
from .tickets import Ticket

NAME = "trt-spec"
EXPORTERS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}  # by protocols of OTLP
NANOSECONDS = 1e9
CLOSE_SECONDS = 5


class Traces:
    """Makes the spans of one server, and hands them to its provider."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer(NAME, version(NAME))

    def around(self, app: ASGIApp, named: Callable[[str], str]) -> ASGIApp:
        """Put a span around each request but those of supervisors; `named` tells the route of a path."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] in QUIET:
                await app(scope, receive, send)
                return
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            method, route = scope["method"], named(scope["path"])
            attributes = {
                "http.request.method": method,
                "http.route": route,
                "url.path": shortened(scope["path"], MOST_NAMED),
                "url.scheme": scope["scheme"],
            }
            notes = scope.setdefault(NOTES, {})
            with self._tracer.start_as_current_span(
                f"{method} {route}", extract(headers), SpanKind.SERVER, attributes
            ) as span:
                notes["trace"] = trace.format_trace_id(span.get_span_context().trace_id)
                await app(scope, receive, send)
                span.set_attribute("http.response.status_code", notes["status"])
                if notes["status"] >= 500:
                    span.set_status(StatusCode.ERROR)

        return traced

    def note(self, ticket: Ticket) -> None:
        """Make the spans of a text that has ended; it is called in the context in which that was submitted."""
        request, began = ticket.request, ticket.submitted_ns
        try:
            output = request.output()
        except TrtSpecError as error:
            self._span("failed", began, time.time_ns(), {}, Status(StatusCode.ERROR, str(error)))
            return
        ended = began + int(output.seconds * NANOSECONDS)
        admitted = ended if output.seconds_waiting is None else began + int(output.seconds_waiting * NANOSECONDS)
        self._span("queue", began, admitted, {})
        if output.seconds_waiting is None:
            return
        first = output.seconds_to_first_token
        read = ended if first is None else began + int(first * NANOSECONDS)
        usage, speculation = output.usage, output.speculation
        self._span(
            "prefill",
            admitted,
            read,
            {"gen_ai.usage.input_tokens": usage.prompt_tokens, "trt_spec.cached_tokens": usage.cached_tokens},
        )
        if first is None:
            return
        self._span(
            "rounds",
            read,
            ended,
            {
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.response.finish_reasons": (output.finish_reason,),
                "trt_spec.drafter": request.drafter,
                "trt_spec.rounds": speculation.rounds,
                "trt_spec.proposed_tokens": speculation.proposed,
                "trt_spec.accepted_tokens": speculation.accepted,
            },
        )

    def close(self) -> None:
        """Send what has not been sent yet, but do not wait for a collector that does not answer."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)

    def _span(
        self, name: str, began: int, ended: int, attributes: dict[str, AttributeValue], status: Status | None = None
    ) -> None:
        span = self._tracer.start_span(name, attributes=attributes, start_time=began)
        if status is not None:
            span.set_status(status)
        span.end(ended)


def open_traces() -> Traces:
    """Send traces as the environment says: where, how, of which requests, and under which name."""
    resource = Resource.create()
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: NAME}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for name in (os.environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(","):
        provider.add_span_processor(BatchSpanProcessor(_exporter(name.strip())))
    return Traces(provider)


def _exporter(name: str) -> SpanExporter:
    if name == "otlp":
        protocols = map(os.environ.get, ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"))
        protocol = next(filter(None, protocols), "http/protobuf")
        if protocol not in EXPORTERS:
            raise RequestError(
                f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}, expected one of {', '.join(EXPORTERS)}; leave it out"
            )
        name = EXPORTERS[protocol]
    for found in entry_points(group="opentelemetry_traces_exporter", name=name):
        exporter: SpanExporter = found.load()()
        return exporter
    raise RequestError(
        f"traces are to go out by {name}, which is not installed; install its exporter of OpenTelemetry, or set "
        "OTEL_TRACES_EXPORTER=otlp and OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
    )
