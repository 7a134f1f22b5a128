"""Chooses draft length and drafter where a request leaves them open: the most expected tokens per millisecond.

It reads what was accepted of the proposals that were examined, never one behind a rejected proposal, and the noise of
each round is fresh: so no choice can bias what comes out.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..drafters.propose import WITH_MODEL
from .costs import Costs

if TYPE_CHECKING:
    from ..requests.request import Request

Numbers = npt.NDArray[np.float64]

FADE = 0.96  # how much of what was seen remains after one more examined proposal
HELD_BEFORE = 2.0  # examined proposals that the expectation counts as
PATIENCE = (16, 128)  # rounds without a drafter before it is tried again: at first, and at most
TRIAL = 2  # proposals of such a round
MARGIN = 1.03  # what speculation has to promise: estimates err, and rounds that differ disturb each other
ALPHAS, SHARES = 64, 16  # levels
PAYBACK = 4  # rounds in which a draft model that has fallen behind has to pay for catching up


class Estimate:
    """How many tokens a request gets out of a drafter's proposals; what is long ago counts less."""

    def __init__(self, acceptance: float, proposing: float) -> None:
        # Accepted of examined proposals, rounds that proposed of all rounds.
        self._seen = [HELD_BEFORE * share for share in (acceptance, 1.0, proposing, 1.0)]
        self.pause = Pause()

    def observe(self, proposed: int, examined: int, accepted: int) -> None:
        fade, seen = FADE**examined, self._seen
        self._seen = [
            fade * seen[0] + accepted,
            fade * seen[1] + examined,
            FADE * seen[2] + (proposed > 0),
            FADE * seen[3] + 1,
        ]

    def doubt(self) -> None:
        """Give what comes next twice the weight."""
        self._seen = [seen / 2 for seen in self._seen]

    @property
    def acceptance(self) -> float:
        return self._seen[0] / self._seen[1]

    @property
    def levels(self) -> tuple[int, int]:
        """Acceptance and share of rounds that propose, so coarse that the same choice is met again."""
        seen = self._seen
        return round(ALPHAS * seen[0] / seen[1]), round(SHARES * seen[2] / seen[3])


def expected_tokens(levels: tuple[int, int], longest: int) -> Numbers:
    """Of a round with K = 0 … longest."""
    gains = np.full(longest + 1, levels[0] / ALPHAS)
    gains[0] = levels[1] / SHARES
    expected: Numbers = gains.cumprod()
    expected[0] = 1.0
    return expected.cumsum()


class Pause:
    """Counts the rounds without something; each time it was tried in vain it waits longer for the next."""

    def __init__(self) -> None:
        self._rounds, self._patience = 0, PATIENCE[0]

    def over(self, used: bool) -> bool:
        if used:
            self._rounds, self._patience = 0, PATIENCE[0]
        elif self._rounds == self._patience:
            self._rounds, self._patience = 0, min(2 * self._patience, PATIENCE[1])
            return True
        else:
            self._rounds += 1
        return False


class Choice(NamedTuple):
    draft_length: int
    drafters: Sequence[str]  # from which each request takes the best


Known = tuple[tuple[str, tuple[int, int]], ...]  # of a request: the levels of each drafter


class Controller:
    """One for all live requests: a round has one width, so its cost is chosen for all of them together."""

    def __init__(self, costs: Costs, longest: int) -> None:
        self.costs = costs
        self._longest = min(longest, costs.longest)
        self._times = lru_cache(maxsize=256)(lambda drafter, batch: np.array(costs.round_times(drafter, batch)))
        self._best = lru_cache(maxsize=4096)(self._find_best)
        self._pause = Pause()

    def begin(self, drafters: Sequence[str]) -> dict[str, Estimate]:
        """What is expected of a new request."""
        return {name: Estimate(self.costs.acceptance[name], self.costs.proposing[name]) for name in drafters}

    def choose(self, live: Sequence["Request"]) -> None:
        """Set what the requests that leave it open take in the next round."""
        free = [request for request in live if request.estimates]
        if not free:
            return
        known = tuple(tuple((name, one.levels) for name, one in request.estimates.items()) for request in free)
        pinned, behind = 0, sum(request.draft_is_behind for request in free)
        if len(free) < len(live):
            pinned = max(request.wanted[0] for request in live if not request.estimates)
        choice = self._best(len(live), pinned, behind, known if len(known) == 1 else tuple(sorted(known)))
        if self._pause.over(used=choice.draft_length > 0):
            choice = Choice(min(TRIAL, self._longest), self._by_price(len(live), known))
            for estimate in (one for request in free for one in request.estimates.values()):
                estimate.doubt()
        for request in free:
            request.chosen = _source(request.estimates, choice) if choice.draft_length else (0, "none")

    def _by_price(self, batch: int, known: Sequence[Known]) -> list[str]:
        return sorted({name for of in known for name, _ in of}, key=lambda name: self._times(name, batch)[1])

    def _find_best(self, batch: int, pinned: int, behind: int, known: Sequence[Known]) -> Choice:
        """Over all K and all drafters up to a price: who pays for a dear one has the cheaper ones with it.

        Of `batch` rows some may be `pinned` to a length, and the draft model has fallen `behind` in some.
        """
        lengths = np.arange(self._longest + 1).clip(pinned)
        expected = [{name: expected_tokens(levels, self._longest) for name, levels in of} for of in known]
        by_price = self._by_price(batch, known)
        best, best_rate = Choice(0, ()), 0.0
        for count, dearest in enumerate(by_price, 1):
            times = self._times(dearest, batch)
            milliseconds = times[lengths.clip(max=len(times) - 1)]
            if dearest in WITH_MODEL:
                milliseconds[1:] += behind * (times[1] - times[0]) / PAYBACK
            tokens = np.full(len(lengths), float(batch - len(known)))  # of the other rows: at least these
            for of in expected:
                mine = [of[name] for name in by_price[:count] if name in of]
                tokens += np.maximum.reduce(mine) if mine else 1.0
            rates = tokens / milliseconds
            k = int(rates.argmax())
            best_rate = best_rate or MARGIN * float(rates[0])
            if rates[k] > best_rate:
                best, best_rate = Choice(k, tuple(by_price[:count])), float(rates[k])
        return best


def _source(estimates: dict[str, Estimate], choice: Choice) -> tuple[int, str]:
    """The best for one request of what the round pays for; now and then another, lest it has become better."""
    k = choice.draft_length
    if len(estimates) == 1:
        [name] = estimates
        return (k, name) if name in choice.drafters else (0, "none")
    worth = {name: expected_tokens(estimates[name].levels, k)[k] for name in choice.drafters if name in estimates}
    if not worth:
        return 0, "none"
    best = chosen = max(worth, key=worth.__getitem__)
    for name, estimate in estimates.items():
        if estimate.pause.over(used=name == best):
            estimate.doubt()
            chosen = name
    return k if chosen in choice.drafters else min(k, TRIAL), chosen
