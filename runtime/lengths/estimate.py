"""Estimates what a request can expect of a drafter, from its own rounds and from earlier requests."""

import numpy as np

from .beside import Numbers, Shapes
from .chooser import Pause

FADE = 0.98  # weight that older observations keep after one more examined proposal
FADE_ROUND = 0.96  # after one more round: whether there is anything to propose changes sooner than acceptance
HELD_BEFORE = 4.0  # examined proposals, and rounds, that a first expectation counts as
KEPT = 0.95  # weight that earlier requests' estimates keep after one more request
ALPHAS, SHARES = 64, 16  # levels of acceptance, and of the share of rounds that propose
GAINS = 8  # levels of the gain beside lines over what was measured
FORGET = 0.01  # of the gain, in each round with lines alone: else a shape that did badly would never be tried again


class Estimate:
    """Estimates how many tokens a request gets out of a drafter's proposals; older rounds count less."""

    def __init__(self, acceptance: float, proposing: float, gain: float = 1.0, held: float = HELD_BEFORE) -> None:
        # Proposals accepted, proposals examined, rounds that proposed, all rounds.
        self._seen = [held * acceptance, held, HELD_BEFORE * proposing, HELD_BEFORE]
        self._expected = self._seen  # what is left of the expectation with which it began
        self._beside = [HELD_BEFORE * gain, HELD_BEFORE]  # siblings and branches: accepted, and expected to be
        self.pause = Pause()

    def observe(self, proposed: int, examined: int, accepted: int) -> None:
        fades = [FADE**examined] * 2 + [FADE_ROUND] * 2
        news = (accepted, examined, proposed > 0, 1)
        self._seen = [fade * seen + new for fade, seen, new in zip(fades, self._seen, news, strict=True)]
        self._expected = [fade * seen for fade, seen in zip(fades, self._expected, strict=True)]

    def observe_beside(self, accepted: int, expected: float) -> None:
        """Learn from a rejected line: `accepted` tokens were accepted beside it, `expected` are on average."""
        seen = self._beside
        self._beside = [FADE_ROUND * seen[0] + accepted, FADE_ROUND * seen[1] + expected]

    def forget_beside(self) -> None:
        """Bring the gain a little closer to what was measured."""
        accepted, expected = self._beside
        self._beside[0] = accepted + FORGET * (expected - accepted)

    def add(self, other: "Estimate") -> None:
        """Add what another estimate has seen itself; what was seen before counts less."""
        news = [seen - expected for seen, expected in zip(other._seen, other._expected, strict=True)]
        if news[3] > 0:
            self._seen = [KEPT * mine + theirs for mine, theirs in zip(self._seen, news, strict=True)]
        self._beside = [KEPT * mine + theirs for mine, theirs in zip(self._beside, other._beside, strict=True)]

    def doubt(self) -> None:
        """Halve the weight of the past, so that what comes next counts twice as much."""
        self._seen = [seen / 2 for seen in self._seen]
        self._expected = [seen / 2 for seen in self._expected]

    @property
    def examined(self) -> float:
        return self._seen[1]

    @property
    def acceptance(self) -> float:
        return self._seen[0] / self._seen[1]

    @property
    def proposing(self) -> float:
        return self._seen[2] / self._seen[3]

    @property
    def gain(self) -> float:
        """The number of tokens accepted beside lines, relative to what was measured."""
        return self._beside[0] / self._beside[1]

    @property
    def levels(self) -> "Levels":
        """Acceptance, share of rounds that propose, and gain beside lines, so coarse that choices can be reused."""
        seen = self._seen
        return round(ALPHAS * seen[0] / seen[1]), round(SHARES * seen[2] / seen[3]), round(GAINS * self.gain)


Levels = tuple[int, int, int]


def expected_tokens(levels: Levels, longest: int) -> Numbers:
    """Return how many tokens a round is expected to give with K = 0 … longest."""
    gains = np.full(longest + 1, levels[0] / ALPHAS)
    gains[0] = levels[1] / SHARES
    expected: Numbers = gains.cumprod()
    expected[0] = 1.0
    return expected.cumsum()


def tokens_beside(levels: Levels, shapes: Shapes, drafter: str, beyond: int, longest: int) -> Numbers:
    """Return how many tokens [S, K+1] shapes of at most `beyond` proposals add to lines of K = 0 … longest."""
    rejected = 1 - (levels[0] / ALPHAS) ** np.arange(longest + 1)
    added: Numbers = np.outer(shapes.tokens(drafter, levels[2] / GAINS, beyond), rejected * levels[1] / SHARES)
    return added
