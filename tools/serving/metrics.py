"""Metrics for Prometheus, under the names that vLLM's dashboards know."""

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ...engines import TrtSpecError
from ...runtime import Speculation
from ...runtime.requests.request import State
from .allowances import PER_MINUTE, ROWS
from .kept_answers import KeptAnswers
from .resident import resident_bytes, unused_bytes

if TYPE_CHECKING:
    from .stepper import Stepper
    from .tickets import Ticket

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80, 160)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 1, 2.5)
HISTOGRAMS = {  # name: help, buckets
    "time_to_first_token_seconds": ("From the arrival of a request to its first token.", SECONDS),
    "inter_token_latency_seconds": ("Between two chunks of a stream, which may hold several tokens.", TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Time per token after the first, of whole requests.", TOKEN_SECONDS),
    "request_queue_time_seconds": ("From the arrival of a request until it gets a row.", SECONDS),
    "e2e_request_latency_seconds": ("From the arrival of a request to its end.", SECONDS),
}
COUNTERS = {
    "prompt_tokens": "Tokens of prompts that were read.",
    "generation_tokens": "Tokens that were written.",
}
NAMED = ("model_name",)
ENDED = ("stop", "length", "cancelled", "error")


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        histograms = {
            name: Histogram(f"vllm:{name}", text, NAMED, buckets=buckets, registry=self.registry).labels(model)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self.to_first_token = histograms["time_to_first_token_seconds"]
        self.between_chunks = histograms["inter_token_latency_seconds"]
        self.per_token = histograms["request_time_per_output_token_seconds"]
        self.queued = histograms["request_queue_time_seconds"]
        self.whole = histograms["e2e_request_latency_seconds"]
        counters = {
            name: Counter(f"vllm:{name}", text, NAMED, registry=self.registry).labels(model)
            for name, text in COUNTERS.items()
        }
        self.prompt_tokens, self.output_tokens = counters.values()
        ended = Counter(
            "vllm:request_success",
            "Requests by how they ended.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self._ended = {reason: ended.labels(model, reason) for reason in ENDED}

        self._answers = Counter(
            "trt_spec:http_requests",
            "Answers by path and status; 499 where the client had gone.",
            ("method", "path", "status"),
            registry=self.registry,
        )
        self._refused = Counter(
            "trt_spec:requests_over_allowance",
            "Requests that were refused with 429, by what their key had used up.",
            (*NAMED, "reason"),
            registry=self.registry,
        )
        refusals = {reason: self._refused.labels(model, reason) for reason in (PER_MINUTE, ROWS)}
        self.count_refusal: Callable[[str], None] = lambda reason: refusals[reason].inc()

    def count_answer(self, method: str, path: str, status: int) -> None:
        self._answers.labels(method, path, status).inc()

    def watch(self, stepper: "Stepper", model: str, kept: KeptAnswers) -> None:
        """Count what the decoder itself knows whenever somebody asks."""
        self.registry.register(Watch(stepper, model, kept))

    def count(self, ticket: "Ticket") -> None:
        """Count a request that has ended."""
        try:
            output = ticket.request.output()
        except TrtSpecError:
            self._ended["error"].inc()
            return
        self._ended[output.finish_reason].inc()
        self.whole.observe(output.seconds)
        if output.seconds_waiting is not None:
            self.queued.observe(output.seconds_waiting)
        if output.seconds_to_first_token is None:
            return
        tokens = output.usage.completion_tokens
        self.prompt_tokens.inc(output.usage.prompt_tokens)
        self.output_tokens.inc(tokens)
        self.to_first_token.observe(output.seconds_to_first_token)
        if tokens > 1:
            self.per_token.observe((output.seconds - output.seconds_to_first_token) / (tokens - 1))

    def page(self) -> bytes:
        return generate_latest(self.registry)


class Watch(Collector):
    """Reads the decoder's own counts at the moment of the question."""

    def __init__(self, stepper: "Stepper", model: str, kept: KeptAnswers) -> None:
        self._stepper, self._model, self._kept = stepper, model, kept

    def collect(self) -> Iterator[Metric]:
        decoder = self._stepper.decoder
        states = [ticket.request.state for ticket in self._stepper.tickets]
        waiting = sum(state is State.WAITING for state in states)
        gauges = {
            "num_requests_running": ("Requests that have a row.", len(states) - waiting),
            "num_requests_waiting": ("Requests that wait for a row.", waiting),
            "kv_cache_usage_perc": ("The part of the caches that holds tokens; 1 is all.", decoder.cache_usage),
        }
        for name, (text, value) in gauges.items():
            yield self._family(GaugeMetricFamily(f"vllm:{name}", text, labels=["model_name"]), [((), value)])
        pools = decoder.held_bytes | {"answers": self._kept.held_bytes, "unused": unused_bytes()}
        yield self._family(
            GaugeMetricFamily(
                "trt_spec:memory_bytes",
                "What each pool of memory holds; steps is the most that attention takes meanwhile on a GPU, unused is "
                "what was freed and the allocator keeps.",
                labels=["model_name", "pool"],
            ),
            [((pool,), held) for pool, held in pools.items()],
        )
        yield GaugeMetricFamily(
            "process_resident_memory_bytes", "What the process takes of the machine's memory.", value=resident_bytes()
        )
        # A copy, because the stepping thread goes on counting.
        speculation = Speculation(Counts(dict(decoder.speculation.outcomes)))
        drafts = sum(count for outcome, count in speculation.outcomes.items() if outcome.proposed)
        counters = {
            "num_drafts": ("Rounds of a request that proposed tokens.", drafts),
            "num_draft_tokens": ("Tokens that were proposed.", speculation.proposed),
            "num_accepted_tokens": ("Proposed tokens that were accepted.", speculation.accepted),
        }
        counters = {f"spec_decode_{name}": counted for name, counted in counters.items()} | {
            "prefix_cache_queries": ("Tokens of prompts that were looked for.", decoder.prefixes.asked_tokens),
            "prefix_cache_hits": ("Tokens of prompts that an earlier request had left.", decoder.prefixes.found_tokens),
        }
        for name, (text, value) in counters.items():
            yield self._family(CounterMetricFamily(f"vllm:{name}", text, labels=["model_name"]), [((), value)])
        for prefix, label, counts in (("", "drafter", decoder.by_drafter), ("adapter_", "adapter", decoder.by_adapter)):
            known = {name: Speculation(Counts(dict(one.outcomes))) for name, one in sorted(counts.items())}
            for what, text in (("proposed", f"Tokens proposed, by {label}."), ("accepted", "The accepted ones.")):
                yield self._family(
                    CounterMetricFamily(f"trt_spec:{prefix}{what}_tokens", text, labels=["model_name", label]),
                    [((name,), getattr(one, what)) for name, one in known.items()],
                )
        yield self._family(
            CounterMetricFamily(
                "trt_spec:grammars_given_up", "Grammars that took too long to compile.", labels=["model_name"]
            ),
            [((), decoder.grammars_given_up)],
        )
        yield self._family(
            CounterMetricFamily(
                "vllm:spec_decode_num_accepted_tokens_per_pos",
                "Accepted tokens by their position in the proposal.",
                labels=["model_name", "position"],
            ),
            [((str(place),), count) for place, count in enumerate(speculation.accepted_at)],
        )

    def _family(
        self, family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[tuple[tuple[str, ...], float]]
    ) -> Metric:
        for labels, value in samples:
            family.add_metric([self._model, *labels], value)
        return family
