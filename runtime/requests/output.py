"""The results of a request."""

from dataclasses import dataclass

from .metrics import Speculation


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt: an earlier request had left them


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probabilities of the model's own distribution, before any transform; of speech, after its rules."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # likeliest first


@dataclass(frozen=True)
class TracedSibling:
    """A token that was proposed beside the one at this place of the first line."""

    place: int
    token: int
    p: float  # the target's probability of it
    q: float  # the draft's, before anything after the same token was drawn
    stands: bool
    after: int | None = None  # which of the siblings it follows; None: a token of the line


@dataclass(frozen=True)
class TracedRound:
    """One round as seen from one request."""

    proposal: tuple[int, ...]
    accepted: int
    next_token: int | None  # None: the text ended inside the accepted proposals
    p: tuple[float, ...]  # target's probability of each proposal
    q: tuple[float, ...]  # draft's
    next_p: float
    entropies: tuple[float, ...] = ()  # the draft's at each proposal, under an EntropyRule
    siblings: tuple[TracedSibling, ...] = ()  # place by place; after the same token in the order of their tests

    @property
    def standing(self) -> tuple[int, ...]:
        """The accepted tokens: those of the first line, and then of what was beside it."""
        ends = [one.token for one in self.siblings if one.stands and one.place < self.accepted]
        return (*self.proposal[: self.accepted - len(ends)], *ends)


@dataclass(frozen=True)
class BeamText:
    """One of the texts that a beam search has found."""

    text: str
    token_ids: tuple[int, ...]
    score: float  # its log-probability, divided by its length to the power of `length_penalty`
    finish_reason: str  # "stop" or "length"


@dataclass(frozen=True)
class Output:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop", "length" or "cancelled"
    stopped_by: str | int | None  # the stop string or the token that has ended it
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None  # the first token follows nothing
    speculation: Speculation
    lossless: bool  # distributed as the target's own output; false with lenience
    seed: int
    seconds: float  # from submission to the last token
    seconds_waiting: float | None  # until it got a row
    seconds_to_first_token: float | None
    trace: tuple[TracedRound, ...]
    beams: tuple[BeamText, ...] = ()  # of a beam search, as many as were asked for, the best first


@dataclass(frozen=True)
class Piece:
    """The additions of one round: text that is certain, tokens, and which of them the draft proposed."""

    text: str
    token_ids: tuple[int, ...]
    from_draft: tuple[bool, ...]
    logprobs: tuple[TokenLogprob, ...] = ()  # one for each token, if they were asked for
    settled: bool = True  # no text of these or earlier tokens is held back
