"""One request: what was asked, where it stands, and what has come out of it."""

import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from time import perf_counter

from ...engines import MAX_DRAFT_LENGTH, RequestError
from ..drafters.propose import DRAFTERS, SAMPLED, WITH_MODEL
from ..drafters.suffix import SuffixAutomaton
from ..lengths.controller import Controller, Estimate
from ..lengths.entropy import EntropyLevel, EntropyRule
from ..sampling.params import SamplingParams
from .metrics import Speculation
from .text import TextStream

AUTO = "auto"  # the draft length that the controller chooses, for each round anew
MIXED = "mixed"  # the drafter likewise, out of these
MIXED_FROM = ("model", "suffix", "ngram")


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities of the model's own distribution, before any transform."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # likeliest first


@dataclass(frozen=True)
class TracedRound:
    """One round as seen from one request."""

    proposal: tuple[int, ...]
    accepted: int
    next_token: int | None  # None: the text ended inside the accepted proposals
    p: tuple[float, ...]  # target's probability of each proposal
    q: tuple[float, ...]  # draft's
    next_p: float
    entropies: tuple[float, ...] = ()  # the draft's where it drew each, under an EntropyRule


@dataclass(frozen=True)
class Output:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop", "length" or "cancelled"
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None
    speculation: Speculation
    lossless: bool  # distributed as the target's own; not with lenience
    seed: int
    seconds: float  # from submission to the last token
    seconds_to_first_token: float | None
    trace: tuple[TracedRound, ...]


@dataclass(frozen=True)
class Piece:
    """What one round added: text that is certain, tokens, and which of them the draft proposed."""

    text: str
    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]


class State(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    LIVE = "live"
    FINISHED = "finished"


class Request:
    """Made by `Decoder.submit`. `draft_length` and `drafter` may be changed between rounds."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        draft_length: int | str | EntropyRule,
        drafter: str,
        stop_ids: frozenset[int],
        text: TextStream,
        *,
        unavailable: Mapping[str, str],  # drafters the bundle cannot serve, and why
        longest_draft: int,
        controller: Controller | None,
        trace: bool,
    ) -> None:
        self.prompt = tuple(prompt)
        self.params = params
        self._unavailable, self._longest_draft, self._controller = unavailable, longest_draft, controller
        self.estimates: dict[str, Estimate] = {}  # by drafter, of those the controller may choose from
        self.chosen = (0, "none")  # by it, where there are any
        self.level: EntropyLevel | None = None  # of an EntropyRule
        self._draft_length: int | str | EntropyRule = 0
        self.drafter = drafter
        self.draft_length = draft_length
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.state = State.WAITING
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.speculation = Speculation()
        self.trace: list[TracedRound] | None = [] if trace else None
        self.target_entries = self.draft_entries = 0  # valid cache entries of its row
        self.context: SuffixAutomaton | None = None  # made when it first drafts with suffix
        self.suggested: list[int] = []  # by it, for the next round
        self.uniform_blocks: list[int | None] = [None, None]  # which lengths its row has uniforms for
        self.cancelled = False
        self._stop_ids = stop_ids
        self._text = text
        self._pieces: deque[Piece] = deque()
        self._logprobs: list[TokenLogprob] = []
        self._submitted = perf_counter()
        self._first_token: float | None = None
        self._ended: float | None = None

    @property
    def draft_length(self) -> int | str | EntropyRule:
        return self._draft_length

    @draft_length.setter
    def draft_length(self, value: int | str | EntropyRule) -> None:
        estimates: dict[str, Estimate] = {}
        if value == AUTO:
            estimates = self._expectations(self._drafter)
        elif self._drafter == MIXED:
            raise RequestError(f"drafter mixed goes with draft_length auto, not with {value!r}; name one drafter")
        elif isinstance(value, EntropyRule):
            self._require_entropy(self._drafter)
            if value.longest > self._longest_draft:
                raise RequestError(f"longest is {value.longest}, expected at most {self._longest_draft}")
        elif type(value) is not int or not 0 <= value <= self._longest_draft:
            limit = "" if self._longest_draft == MAX_DRAFT_LENGTH else ", the longest that a plan was compiled for"
            raise RequestError(
                f"draft_length is {value!r}, expected auto or a whole number from 0 to {self._longest_draft}{limit}"
            )
        self.estimates, self.level = estimates, EntropyLevel(value) if isinstance(value, EntropyRule) else None
        self._draft_length = value

    @property
    def drafter(self) -> str:
        return self._drafter

    @drafter.setter
    def drafter(self, value: str) -> None:
        if value not in (*DRAFTERS, MIXED):
            raise RequestError(f"drafter is {value!r}, expected one of {', '.join((*DRAFTERS, MIXED))}")
        if value in self._unavailable:
            raise RequestError(self._unavailable[value])
        if self._draft_length == AUTO:
            self.estimates = self._expectations(value)
        elif self.level is not None:
            self._require_entropy(value)
        self._drafter = value

    def _expectations(self, drafter: str) -> dict[str, Estimate]:
        if drafter == "none":
            return {}
        if self._controller is None:
            raise RequestError(
                "draft_length auto needs to know what rounds cost here; run trt-spec tune, or name a number"
            )
        measured = self._controller.costs.acceptance
        if drafter not in (*measured, MIXED):
            raise RequestError(
                f"draft_length auto knows the costs of drafter {' and '.join(measured)} only, not of {drafter}; "
                "run trt-spec tune again, or name a number"
            )
        return self._controller.begin(
            [name for name in MIXED_FROM if name in measured] if drafter == MIXED else [drafter]
        )

    def _require_entropy(self, drafter: str) -> None:
        if drafter not in (*SAMPLED, "none"):
            raise RequestError(
                f"drafter {drafter} has no entropy to choose a draft length by; use {' or '.join(SAMPLED)}, or a number"
            )

    @property
    def entropy_limit(self) -> float | None:
        """Where the draft's entropy ends a round's proposals; None if nobody asks for it."""
        return None if self.level is None else self.level.rule.stop_above

    @property
    def wanted(self) -> tuple[int, str]:
        """How many proposals a round, and from where."""
        if self.estimates:
            return self.chosen
        length = self._draft_length if self.level is None else self.level.draft_length
        return (length, self._drafter) if type(length) is int and length and self._drafter != "none" else (0, "none")

    @property
    def draft_is_behind(self) -> bool:
        """Whether the draft model has to read what is missing in its cache before it can propose."""
        return self.length - 2 > self.draft_entries

    @property
    def may_draft_with_model(self) -> bool:
        return self._drafter in WITH_MODEL or any(drafter in WITH_MODEL for drafter in self.estimates)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def remaining(self) -> int:
        """The most tokens that may still come."""
        return self.params.max_new_tokens - len(self.token_ids)

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    def take(self) -> list[Piece]:
        """The pieces that came out since the last call."""
        pieces = []
        while self._pieces:
            pieces.append(self._pieces.popleft())
        return pieces

    def commit(self, tokens: Sequence[int], accepted: int, logprobs: Sequence[TokenLogprob]) -> int:
        """Append a round's tokens up to the first stop rule; returns how many were kept."""
        self._first_token = self._first_token or perf_counter()
        kept, reason = 0, None
        for token in tokens:
            kept += 1
            self.token_ids.append(token)
            if token in self._stop_ids or self._text.push(token):
                reason = "stop"
            elif len(self.token_ids) == self.params.max_new_tokens:
                reason = "length"
            if reason is not None:
                break
        if (top := self.params.logprobs) is not None:
            self._logprobs += [replace(one, top=one.top[:top]) for one in logprobs[:kept]]
        from_draft = tuple(index < accepted for index in range(kept))
        if reason is None:
            self._pieces.append(Piece(self._text.take(), tuple(tokens[:kept]), from_draft))
        else:
            self.finish(reason, tuple(tokens[:kept]), from_draft)
        return kept

    def finish(self, reason: str, tokens: tuple[int, ...] = (), from_draft: tuple[bool, ...] = ()) -> None:
        """End with a last piece: these tokens and all text that was held back."""
        if self._text.finish() and reason == "length":
            reason = "stop"
        text = self._text.take(everything=True)
        if text or tokens:
            self._pieces.append(Piece(text, tokens, from_draft))
        self.finish_reason, self._ended = reason, perf_counter()
        self.state = State.FINISHED  # last: other threads wait for it

    def output(self) -> Output:
        """What has come out so far; final once `finished`."""
        return Output(
            text=self._text.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason or "cancelled",
            usage=Usage(len(self.prompt), len(self.token_ids)),
            logprobs=None if self.params.logprobs is None else tuple(self._logprobs),
            speculation=self.speculation,
            lossless=not self.params.lenient,
            seed=self.seed,
            seconds=(self._ended or perf_counter()) - self._submitted,
            seconds_to_first_token=None if self._first_token is None else self._first_token - self._submitted,
            trace=tuple(self.trace or ()),
        )
