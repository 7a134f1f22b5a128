"""Chooses draft length and drafter where a request leaves them open: the most expected tokens per millisecond.

It reads what was accepted of the proposals that were examined, never one behind a rejected proposal, and the noise of
each round is fresh: so no choice can bias what comes out.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..drafters import DRAFTERS
from ..requests.metrics import Outcome
from .chooser import NOTHING, Chooser, Pause, Wanted
from .costs import Costs

Numbers = npt.NDArray[np.float64]

FADE = 0.96  # how much of what was seen remains after one more examined proposal
HELD_BEFORE = 2.0  # examined proposals that the expectation counts as
KEPT = 0.8  # how much of earlier requests' estimates remains after one more request
TRIAL = 2  # proposals of a round that tries a drafter again
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

    def add(self, other: "Estimate") -> None:
        """Let another estimate count, and what was seen before it less."""
        self._seen = [KEPT * mine + theirs for mine, theirs in zip(self._seen, other._seen, strict=True)]

    def doubt(self) -> None:
        """Give what comes next twice the weight."""
        self._seen = [seen / 2 for seen in self._seen]

    @property
    def acceptance(self) -> float:
        return self._seen[0] / self._seen[1]

    @property
    def proposing(self) -> float:
        return self._seen[2] / self._seen[3]

    @property
    def levels(self) -> tuple[int, int]:
        """Acceptance and share of rounds that propose, so coarse that the same choice is met again."""
        seen = self._seen
        return round(ALPHAS * seen[0] / seen[1]), round(SHARES * seen[2] / seen[3])


def expected_tokens(levels: tuple[int, int], longest: int) -> Numbers:
    """The tokens that a round is expected to give with K = 0 … longest."""
    gains = np.full(longest + 1, levels[0] / ALPHAS)
    gains[0] = levels[1] / SHARES
    expected: Numbers = gains.cumprod()
    expected[0] = 1.0
    return expected.cumsum()


class ByCosts(Chooser):
    """What a controller has chosen for one request, out of the drafters it has estimates of."""

    def __init__(self, estimates: dict[str, Estimate]) -> None:
        super().__init__()
        self.estimates = estimates
        self.best: str | None = None  # the drafter that is worth most here; None where nothing pays

    @property
    def drafters(self) -> Sequence[str]:
        return tuple(self.estimates)

    def observe(self, drafter: str, outcome: Outcome, entropies: Sequence[float]) -> None:
        if drafter in self.estimates:
            self.estimates[drafter].observe(outcome.proposed, outcome.examined, outcome.stood)

    def choose(self, choice: "Choice") -> None:
        """Take the best of what the round pays for, or now and then another one, in case it has become better."""
        k, self.best = choice.draft_length, None
        if not k:
            self._wanted = NOTHING
        elif len(self.estimates) == 1:
            [name] = self.estimates
            self._wanted = Wanted(k, name) if name in choice.drafters else NOTHING
        else:
            worth = {
                name: expected_tokens(self.estimates[name].levels, k)[k]
                for name in choice.drafters
                if name in self.estimates
            }
            if not worth:
                self._wanted = NOTHING
                return
            self.best = chosen = max(worth, key=worth.__getitem__)
            for name, estimate in self.estimates.items():
                if estimate.pause.over and name != self.best:
                    chosen = name
            self._wanted = Wanted(k if chosen in choice.drafters else min(k, TRIAL), chosen)

    def count(self) -> None:
        """A round has ended: the drafters it did not use have waited one more."""
        if self.best is not None:
            for name, estimate in self.estimates.items():
                if estimate.pause.over and name != self.best:
                    estimate.doubt()
                estimate.pause.count(used=name == self.best)


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
        self._pays = False  # whether speculation was worth its cost when last chosen
        self.forget()

    def forget(self) -> None:
        """Expect of new requests what was measured, not what the last ones were like."""
        self._usual = {
            name: Estimate(self.costs.acceptance[name], self.costs.proposing[name]) for name in self.costs.acceptance
        }

    def begin(self, drafters: Sequence[str]) -> ByCosts:
        """The chooser of a new request, which expects of each drafter what it did for the last requests."""
        return ByCosts({name: Estimate(self._usual[name].acceptance, self._usual[name].proposing) for name in drafters})

    def ended(self, chooser: Chooser) -> None:
        """A request has ended: remember what it got out of its drafters."""
        if isinstance(chooser, ByCosts):
            for name, estimate in chooser.estimates.items():
                self._usual[name].add(estimate)

    def choose(self, live: Sequence[Chooser], is_behind: Sequence[bool]) -> None:
        """Set what the requests that leave it open want in the next round; the draft model is behind in some of them.

        To ask twice changes nothing: `count` says that a round has ended.
        """
        free = _free(live)
        if not free:
            return
        known = tuple(tuple((name, one.levels) for name, one in chooser.estimates.items()) for chooser in free)
        behind = sum(late for chooser, late in zip(live, is_behind, strict=True) if chooser in free)
        pinned = max((one.wanted.length for one in live if not isinstance(one, ByCosts)), default=0)
        choice = self._best(len(live), pinned, behind, known if len(known) == 1 else tuple(sorted(known)))
        self._pays = choice.draft_length > 0
        if self._pause.over and not self._pays:
            choice = Choice(min(TRIAL, self._longest), self._by_price(len(live), known))
        for chooser in free:
            chooser.choose(choice)

    def count(self, live: Sequence[Chooser]) -> None:
        """A round of these requests has ended."""
        free = _free(live)
        if not free:
            return
        if self._pause.over and not self._pays:
            for estimate in (one for chooser in free for one in chooser.estimates.values()):
                estimate.doubt()
        self._pause.count(used=self._pays)
        for chooser in free:
            chooser.count()

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
            if DRAFTERS[dearest].needs_model:
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


def _free(live: Sequence[Chooser]) -> list[ByCosts]:
    return [chooser for chooser in live if isinstance(chooser, ByCosts) and chooser.estimates]
