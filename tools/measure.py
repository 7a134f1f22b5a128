"""Timing of one setting: whole rounds as they come, and between them the bare runs that they are made of.

Any run of a round may be repeated after it: it writes the same values to the same cache entries. So the bare runs
happen in the order, at the lengths and in the memory state of real rounds, and share the machine's noise with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

from ..engines import RequestError, Step
from ..runtime import Decoder, Request, SamplingParams, Speculation
from ..runtime.request import State
from .bandwidth import wait_for

ROUNDS_PER_REPLAY = 4


@dataclass(frozen=True)
class Setting:
    draft_length: int
    drafter: str  # "none" where draft_length is 0


@dataclass
class Bare:
    """Milliseconds of the engine's own runs."""

    first_draft: list[float] = field(default_factory=list)  # two tokens wide, or all in one step
    draft: list[float] = field(default_factory=list)
    verify: list[float] = field(default_factory=list)


@dataclass
class Measured:
    """What was seen of one setting in all repeats. Prompts are no part of it: it begins once all rows are live."""

    setting: Setting
    tokens_per_second: list[float] = field(default_factory=list)  # one a repeat
    round_ms: list[float] = field(default_factory=list)
    bare: Bare = field(default_factory=Bare)
    speculation: list[Speculation] = field(default_factory=list)  # one a request

    @property
    def draft_ms(self) -> float:
        """All bare draft steps of a round."""
        k = self.setting.draft_length
        if not self.bare.first_draft:
            return 0.0
        return median(self.bare.first_draft) + (k - 1) * (median(self.bare.draft) if self.bare.draft else 0.0)

    @property
    def verify_ms(self) -> float:
        return median(self.bare.verify)

    @property
    def round_overhead(self) -> float:
        return median(self.round_ms) / (self.draft_ms + self.verify_ms)


def measure(decoder: Decoder, prompts: Sequence[str], params: Sequence[SamplingParams], into: Measured) -> None:
    """One repeat: decode all prompts, `max_batch` at a time."""
    tokens, seconds = 0, 0.0
    for first in range(0, len(prompts), decoder.max_batch):
        group = slice(first, first + decoder.max_batch)
        counted, elapsed = _decode_group(decoder, prompts[group], params[group], into)
        tokens, seconds = tokens + counted, seconds + elapsed
    if not into.bare.verify:
        raise RequestError(
            f"K = {into.setting.draft_length}: with {params[0].max_new_tokens} new tokens no round runs whole while "
            "all prompts decode; raise --max-new-tokens or lower --batch"
        )
    into.tokens_per_second.append(tokens / seconds)


def _decode_group(
    decoder: Decoder, prompts: Sequence[str], params: Sequence[SamplingParams], into: Measured
) -> tuple[int, float]:
    setting = into.setting
    requests = [
        decoder.submit(prompt, param, draft_length=setting.draft_length, drafter=setting.drafter)
        for prompt, param in zip(prompts, params, strict=True)
    ]
    tokens, seconds, rounds = 0, 0.0, 0
    while live := [request for request in requests if not request.finished]:
        only_rounds = all(request.state is State.LIVE for request in live)
        before = _decoded(requests)
        began = perf_counter()
        decoder.step()
        if rounds % ROUNDS_PER_REPLAY == 0:  # a round in flight ends on the clock, before the bare runs
            wait_for(decoder.target.engine.device)
        elapsed = perf_counter() - began
        if not only_rounds:
            continue
        tokens, seconds, rounds = tokens + _decoded(requests) - before, seconds + elapsed, rounds + 1
        if len(live) == len(requests):
            into.round_ms.append(1e3 * elapsed)
            if rounds % ROUNDS_PER_REPLAY == 1 and not any(request.finished for request in requests):
                _replay(decoder, into.bare)
    into.speculation += [request.speculation for request in requests]
    return tokens, seconds


def _decoded(requests: Sequence[Request]) -> int:
    return sum(len(request.token_ids) for request in requests)


def _replay(decoder: Decoder, bare: Bare) -> None:
    frame, device = decoder.last_frame, decoder.target.engine.device
    assert frame is not None
    with decoder.between_rounds():
        for first, step in enumerate(frame.draft_runs):
            (bare.draft if first else bare.first_draft).append(_run_ms(step, device))
        bare.verify.append(_run_ms(frame.verify, device))


def _run_ms(step: Step, device: str) -> float:
    wait_for(device)
    began = perf_counter()
    step.run()
    wait_for(device)
    return 1e3 * (perf_counter() - began)
