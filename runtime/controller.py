"""Chooses draft length and drafter where a request leaves them open: the most expected tokens per millisecond.

It reads what was accepted of the proposals that were examined, never one behind a rejected proposal, and the noise of
each round is fresh: so no choice can bias what comes out.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from .costs import Costs

if TYPE_CHECKING:
    from .request import Request

FADE = 0.96  # how much of what was seen remains after one more examined proposal
HELD_BEFORE = 2.0  # examined proposals that the expectation counts as
PATIENCE = (8, 64)  # rounds without a drafter before it is tried again: at first, and at most
TRIAL = 2  # proposals of such a round


class Estimate:
    """How many tokens a request gets out of a drafter's proposals; what is long ago counts less."""

    def __init__(self, acceptance: float, proposing: float) -> None:
        # Accepted of examined proposals, rounds that proposed of all rounds.
        self._seen = [HELD_BEFORE * share for share in (acceptance, 1.0, proposing, 1.0)]
        self.pause = Pause()

    def observe(self, proposed: int, examined: int, accepted: int) -> None:
        fade = FADE**examined
        before = self._seen
        self._seen = [
            fade * before[0] + accepted,
            fade * before[1] + examined,
            FADE * before[2] + (proposed > 0),
            FADE * before[3] + 1,
        ]

    def doubt(self) -> None:
        """Give what comes next twice the weight."""
        self._seen = [seen / 2 for seen in self._seen]

    @property
    def acceptance(self) -> float:
        return self._seen[0] / self._seen[1]

    def tokens(self, longest: int) -> list[float]:
        """Expected of a round with K = 0 … longest."""
        alpha, gain, expected = self.acceptance, self._seen[2] / self._seen[3], [1.0]
        for _ in range(longest):
            gain *= alpha
            expected.append(expected[-1] + gain)
        return expected


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


class Controller:
    """One for all live requests: a round has one width, so its cost is chosen for all of them together."""

    def __init__(self, costs: Costs, longest: int) -> None:
        self.costs = costs
        self._longest = min(longest, costs.longest)
        self._times = lru_cache(maxsize=256)(costs.round_times)
        self._pause = Pause()

    def begin(self, drafters: Sequence[str]) -> dict[str, Estimate]:
        """What is expected of a new request."""
        return {name: Estimate(self.costs.acceptance[name], self.costs.proposing[name]) for name in drafters}

    def choose(self, live: Sequence["Request"]) -> None:
        """Set what the requests that leave it open take in the next round."""
        free = [request for request in live if request.estimates]
        if not free:
            return
        by_price = sorted(
            {name for request in free for name in request.estimates},
            key=lambda name: self._times(name, len(live))[1],
        )
        choice = self._best(live, free, by_price)
        if self._pause.over(used=choice.draft_length > 0):
            choice = Choice(min(TRIAL, self._longest), by_price)
            for estimate in (one for request in free for one in request.estimates.values()):
                estimate.doubt()
        for request in free:
            request.chosen = _source(request.estimates, choice)

    def _best(self, live: Sequence["Request"], free: Sequence["Request"], by_price: Sequence[str]) -> Choice:
        """Over all K and all drafters up to a price: who pays for a dear one has the cheaper ones with it."""
        pinned = max((request.wanted[0] for request in live if not request.estimates), default=0)
        others = float(len(live) - len(free))  # tokens of a round that are not chosen here: at least these
        expected = [{name: one.tokens(self._longest) for name, one in request.estimates.items()} for request in free]
        best, best_rate = Choice(0, ()), 0.0
        for count in range(1, len(by_price) + 1):
            drafters = by_price[:count]
            times = self._times(by_price[count - 1], len(live))
            for k in range(self._longest + 1):
                tokens = others + sum(
                    max((of[name][k] for name in drafters if name in of), default=1.0) for of in expected
                )
                rate = tokens / times[min(max(k, pinned), len(times) - 1)]
                if rate > best_rate:
                    best, best_rate = Choice(k, drafters), rate
        return best


def _source(estimates: dict[str, Estimate], choice: Choice) -> tuple[int, str]:
    """The best for one request of what the round pays for; now and then another, lest it has become better."""
    k = choice.draft_length
    worth = {name: estimates[name].tokens(k)[k] for name in choice.drafters if name in estimates}
    if not k or not worth:
        return 0, "none"
    best = chosen = max(worth, key=worth.__getitem__)
    if len(estimates) > 1:
        for name, estimate in estimates.items():
            if estimate.pause.over(used=name == best):
                estimate.doubt()
                chosen = name
    return k if chosen in choice.drafters else min(k, TRIAL), chosen
