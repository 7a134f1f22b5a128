"""Time the rounds of a setting as they come, and between them the bare engine runs that they are made of.

Any run of a round may be repeated after it: it writes the same values to the same cache entries. So the bare runs
happen in the order, at the lengths and in the memory state of real rounds, and share the machine's noise with them.
Where rounds are recorded as CUDA graphs, so are the bare runs, and no round counts that was not replayed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from ...engines import RequestError
from ...runtime import Decoder, Request, SamplingParams, Speculation
from ...runtime.requests.prompts import Prompt
from ...runtime.requests.request import State
from ...runtime.state.asked import AUTO, BESIDE, DraftLength
from ...runtime.state.shapes import Shape
from .bare_steps import BareSteps
from .clock import now, wait_for

ROUNDS_PER_BARE = 4
PARTS = ("draft", "verify", "accept", "host")  # of a round
PERCENTILES = (50, 99)


@dataclass(frozen=True)
class Setting:
    draft_length: int
    drafter: str  # "none" where draft_length is 0
    auto: bool = False  # each round's draft length is chosen for it
    other_drafter: bool = False  # measured besides the drafter whose lengths are compared
    shape: Shape | None = None  # of a comb or a tree

    @property
    def is_tree(self) -> bool:
        """True if its rounds verify more than one line, for which theory has no formula here."""
        return self.shape is not None or BESIDE in self.drafter

    @property
    def length(self) -> DraftLength:
        """The draft length that its requests ask for."""
        if self.auto:
            return AUTO
        return self.draft_length if self.shape is None else self.shape

    def __str__(self) -> str:
        return f"K = {self.length}" + (f", {self.drafter}" if self.other_drafter else "")


@dataclass
class Bare:
    """Milliseconds of the engine's own runs."""

    first_draft: dict[str, list[float]] = field(default_factory=dict)  # by drafter: wider than those that follow
    draft: dict[str, list[float]] = field(default_factory=dict)
    verify: list[float] = field(default_factory=list)
    draft_steps: dict[str, int] = field(default_factory=dict)  # of a round, by drafter


@dataclass
class Waits:
    """Milliseconds from submission to the first token, and from each token to the next.

    The tokens of a round come together: the first has waited for the round, the others have not waited.
    """

    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)

    def add(self, tokens: int, waited_ms: float, first: bool) -> None:
        (self.first_token if first else self.between_tokens).append(waited_ms)
        self.between_tokens += [0.0] * (tokens - 1)

    def to_json(self) -> dict[str, dict[str, float]]:
        return {
            "first_token_ms": percentiles(self.first_token, PERCENTILES),
            "between_tokens_ms": percentiles(self.between_tokens, PERCENTILES),
        }


class TimedRound(NamedTuple):
    ms: float
    parts_ms: list[float]  # of the PARTS
    replayed: bool
    entries: int = 0  # tokens of all rows before it, which it reads from the caches


@dataclass
class Measured:
    """One setting in all repeats. All but `waits` is counted only once all rows are live."""

    setting: Setting
    tokens_per_second: list[float] = field(default_factory=list)  # one a repeat
    rounds: list[TimedRound] = field(default_factory=list)
    waits: Waits = field(default_factory=Waits)
    bare: Bare = field(default_factory=Bare)
    speculation: list[Speculation] = field(default_factory=list)  # one a request
    kernels_per_round: float | None = None  # counted on a GPU

    @property
    def lasting(self) -> list[TimedRound]:
        """The rounds that are like those to come: replayed ones, if there are any."""
        return [one for one in self.rounds if one.replayed] or self.rounds

    @property
    def round_ms(self) -> list[float]:
        return [one.ms for one in self.lasting]

    @property
    def parts_ms(self) -> list[list[float]]:
        return [one.parts_ms for one in self.lasting]

    @property
    def draft_ms(self) -> float:
        """The bare draft steps of a round together."""
        more = self.setting.draft_length - 1
        firsts, others = self.bare.first_draft, self.bare.draft
        return sum(
            median(runs) + (more * median(others[drafter]) if drafter in others else 0.0)
            for drafter, runs in firsts.items()
        )

    @property
    def verify_ms(self) -> float:
        return median(self.bare.verify)

    @property
    def round_overhead(self) -> float:
        return median(self.round_ms) / (self.draft_ms + self.verify_ms)


def percentiles(values: Sequence[float], shares: Sequence[int]) -> dict[str, float]:
    return {f"p{share}": float(np.percentile(values, share)) for share in shares}


def total(each: Iterable[Speculation]) -> Speculation:
    """The sum of what speculation did for single requests."""
    merged = Speculation()
    for one in each:
        merged.add(one)
    return merged


def refuse_unfit(decoder: Decoder, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None:
    """Refuse a request that does not fit before anything is timed."""
    for prompt, param in zip(prompts, params, strict=True):
        decoder.cancel(decoder.submit(prompt, param, draft_length=0, drafter="none"))


def measure(decoder: Decoder, prompts: Sequence[Prompt], params: Sequence[SamplingParams], into: Measured) -> None:
    """Decode all prompts once, `max_batch` at a time, with no memory of earlier outputs."""
    decoder.forget_outputs()
    tokens, seconds = 0, 0.0
    steps = BareSteps(decoder.target.engine.device, decoder.recorded)
    for first in range(0, len(prompts), decoder.max_batch):
        group = slice(first, first + decoder.max_batch)
        counted, elapsed = _decode_group(decoder, prompts[group], params[group], steps, into)
        tokens, seconds = tokens + counted, seconds + elapsed
    if not (into.bare.verify and seconds):
        raise RequestError(
            f"{into.setting}: with {params[0].max_new_tokens} new tokens no round runs whole while "
            "all prompts decode; raise --max-new-tokens or lower --batch"
        )
    into.tokens_per_second.append(tokens / seconds)


def _decode_group(
    decoder: Decoder,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    steps: BareSteps,
    into: Measured,
) -> tuple[int, float]:
    setting = into.setting
    began = now()
    requests = [
        decoder.submit(prompt, param, draft_length=setting.length, drafter=setting.drafter)
        for prompt, param in zip(prompts, params, strict=True)
    ]
    clock = now() - began  # stands still while bare runs are timed
    arrived = [0.0] * len(requests)
    tokens, seconds, rounds = 0, 0.0, 0
    while live := [request for request in requests if not request.finished]:
        entries = sum(request.length for request in live)
        only_rounds = all(request.state is State.LIVE for request in live)
        before, parts_before = [len(request.token_ids) for request in requests], _parts(requests[0])
        began = now()
        decoder.step()
        if rounds % ROUNDS_PER_BARE == 0:  # the clock includes a round in flight, which must end before bare runs
            wait_for(decoder.target.engine.device)
        elapsed = now() - began
        clock += elapsed
        new = [len(request.token_ids) - count for request, count in zip(requests, before, strict=True)]
        for row, count in enumerate(new):
            if count and not before[row]:  # a first token may come before the step has ended
                arrived[row] = requests[row].output().seconds_to_first_token or clock
                into.waits.add(1, 1e3 * arrived[row], first=True)
                count -= 1
            if count:
                into.waits.add(count, 1e3 * (clock - arrived[row]), first=False)
                arrived[row] = clock
        if not only_rounds or len(live) < len(requests):
            continue  # a text that has ended leaves its place empty, which in a service another would take
        tokens, seconds, rounds = tokens + sum(new), seconds + elapsed, rounds + 1
        parts = zip(_parts(requests[0]), parts_before, strict=True)
        parts_ms = [after - earlier for after, earlier in parts]
        into.rounds.append(TimedRound(1e3 * elapsed, parts_ms, decoder.replayed, entries))
        if rounds % ROUNDS_PER_BARE == 1 and not any(request.finished for request in requests):
            _time_bare(decoder, steps, into.bare)
    into.speculation += [request.speculation for request in requests]
    return tokens, seconds


def _parts(request: Request) -> list[float]:
    """The milliseconds of each part, over all rounds of the request."""
    return [getattr(request.speculation, f"{part}_ms") for part in PARTS]


def _time_bare(decoder: Decoder, steps: BareSteps, bare: Bare) -> None:
    frame = decoder.last_frame
    assert frame is not None
    with decoder.between_rounds():
        for drafter, runs in frame.draft_runs.items():
            bare.draft_steps[drafter] = len(runs)
            for first, step in enumerate(runs):
                kind = bare.draft if first else bare.first_draft
                kind.setdefault(drafter, []).append(steps.ms(step))
        bare.verify.append(steps.ms(frame.verify))
        frame.settle()
