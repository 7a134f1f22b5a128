"""What speculation did, for one request or for all of them."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Speculation:
    """Counts of rounds and proposals; a round that proposes nothing counts no proposal.

    `acceptance` is accepted ÷ examined, a proposal being examined up to and including the first rejected one (the α
    of the theory); `yield_` is accepted ÷ proposed.
    """

    rounds: int = 0
    tokens: int = 0
    proposed: int = 0
    examined: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)  # rounds that accepted 0, 1, 2, … proposals
    examined_at: list[int] = field(default_factory=list)  # by position of the proposal
    accepted_at: list[int] = field(default_factory=list)
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    accept_ms: float = 0.0
    host_ms: float = 0.0

    def add_round(self, proposed: int, accepted: int, kept: int) -> None:
        """Count a round whose first `kept` tokens were kept; what lies beyond an end of text was never examined."""
        self.rounds += 1
        self.tokens += kept
        if not proposed:
            return
        accepted = min(accepted, kept)
        examined = min(accepted + 1, kept, proposed)
        missing = proposed + 1 - len(self.histogram)
        if missing > 0:
            self.histogram += [0] * missing
            self.examined_at += [0] * (proposed - len(self.examined_at))
            self.accepted_at += [0] * (proposed - len(self.accepted_at))
        self.proposed += proposed
        self.examined += examined
        self.accepted += accepted
        self.histogram[accepted] += 1
        for position in range(examined):
            self.examined_at[position] += 1
        for position in range(accepted):
            self.accepted_at[position] += 1

    def add_times(self, draft_ms: float, verify_ms: float, accept_ms: float, host_ms: float) -> None:
        self.draft_ms += draft_ms
        self.verify_ms += verify_ms
        self.accept_ms += accept_ms
        self.host_ms += host_ms

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.examined if self.examined else None

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
            "proposed": self.proposed,
            "examined": self.examined,
            "accepted": self.accepted,
            "acceptance": self.acceptance,
            "yield": self.yield_,
            "tokens_per_round": self.tokens_per_round,
            "histogram": self.histogram,
            "acceptance_by_position": self.acceptance_by_position,
        }
