"""The statistics of speculation, for one request or for all of them."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..state.shapes import Shape


class Outcome(NamedTuple):
    """One round of one request; if the text ends inside the accepted proposals, fewer tokens are `kept`."""

    proposed: int
    accepted: int
    kept: int

    @property
    def in_output(self) -> int:
        """Accepted proposals that are part of the output."""
        return min(self.accepted, self.kept, self.proposed)

    @property
    def examined(self) -> int:
        """Proposals up to and including the first rejected one; none beyond an end of text counts."""
        return min(self.accepted + 1, self.kept, self.proposed)


class Beside(NamedTuple):
    """The shape of a line that was rejected, and how many of the tokens beside it were accepted."""

    shape: Shape
    accepted: int


@dataclass
class Speculation:
    """Counts the rounds by outcome; all other counts follow. A round that proposes nothing counts no proposal.

    The first token after a prompt of several comes with the reading of the prompt, and belongs to no round.
    `acceptance` is accepted ÷ examined (the α of the theory); the first rejected proposal is the last
    one examined, also where a rule judges them together.
    `yield_` is accepted ÷ proposed. Where tokens are beside one another their places count, at which any of them may
    be accepted, down to the deepest after an accepted one: a round that ends with a leaf has proposed what it accepted.
    """

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    beside: Counter[Beside] = field(default_factory=Counter)
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    accept_ms: float = 0.0
    host_ms: float = 0.0

    def add_round(self, outcome: Outcome, beside: Beside | None = None) -> None:
        self.outcomes[outcome] += 1
        if beside is not None:
            self.beside[beside] += 1

    def add_times(self, draft_ms: float, verify_ms: float, accept_ms: float, host_ms: float) -> None:
        self.draft_ms += draft_ms
        self.verify_ms += verify_ms
        self.accept_ms += accept_ms
        self.host_ms += host_ms

    def add(self, other: "Speculation") -> None:
        self.outcomes.update(other.outcomes)
        self.beside.update(other.beside)
        self.add_times(other.draft_ms, other.verify_ms, other.accept_ms, other.host_ms)

    @property
    def rounds(self) -> int:
        return self.outcomes.total()

    @property
    def tokens(self) -> int:
        return sum(outcome.kept * rounds for outcome, rounds in self.outcomes.items())

    @property
    def passes_saved(self) -> int:
        """How many more passes of the target its tokens would have taken without proposals; of beams, its steps."""
        return self.tokens - self.rounds

    @property
    def proposed(self) -> int:
        return sum(outcome.proposed * rounds for outcome, rounds in self.outcomes.items())

    @property
    def examined(self) -> int:
        return sum(self.examined_at)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_at)

    @property
    def histogram(self) -> list[int]:
        """The numbers of rounds that accepted 0, 1, 2, … of their proposals."""
        longest = max((outcome.proposed for outcome in self.outcomes), default=0)
        rounds = [0] * (longest + 1 if longest else 0)
        for outcome, count in self.outcomes.items():
            if outcome.proposed:
                rounds[outcome.in_output] += count
        return rounds

    @property
    def examined_at(self) -> list[int]:
        """The number of rounds that examined a proposal, for each position."""
        return self._at_each_position([outcome.examined for outcome in self.outcomes])

    @property
    def accepted_at(self) -> list[int]:
        return self._at_each_position([outcome.in_output for outcome in self.outcomes])

    def _at_each_position(self, reached: list[int]) -> list[int]:
        longest = max((outcome.proposed for outcome in self.outcomes), default=0)
        rounds = list(zip(reached, self.outcomes.values(), strict=True))
        return [sum(count for end, count in rounds if end > position) for position in range(longest)]

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.examined if self.examined else None

    @property
    def accepted_beside(self) -> float | None:
        """The accepted tokens beside a line, on average, where it was rejected; of leaves at most one can be."""
        accepted = sum(one.accepted * rounds for one, rounds in self.beside.items())
        return accepted / self.beside.total() if self.beside else None

    @property
    def yield_(self) -> float | None:
        return self.accepted / self.proposed if self.proposed else None

    @property
    def tokens_per_round(self) -> float | None:
        return self.tokens / self.rounds if self.rounds else None

    @property
    def acceptance_by_position(self) -> list[float | None]:
        pairs = zip(self.accepted_at, self.examined_at, strict=True)
        return [accepted / examined if examined else None for accepted, examined in pairs]

    def to_json(self) -> dict[str, Any]:
        return {
            "rounds": self.rounds,
            "passes_saved": self.passes_saved,
            "proposed": self.proposed,
            "examined": self.examined,
            "accepted": self.accepted,
            "acceptance": self.acceptance,
            "yield": self.yield_,
            "tokens_per_round": self.tokens_per_round,
            "histogram": self.histogram,
            "acceptance_by_position": self.acceptance_by_position,
        }
