"""Chooses draft length and drafter where a request leaves them open, for the most expected tokens per millisecond.

It learns only from proposals that were examined, never from one behind a rejected proposal, and each round draws fresh
noise. So no choice can bias the output.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..drafters import DRAFTERS
from ..requests.metrics import Beside, Outcome
from ..sampling.noise import MOST_SIBLINGS
from .chooser import NOTHING, Chooser, Pause, Wanted
from .costs import Costs

Numbers = npt.NDArray[np.float64]

FADE = 0.96  # weight that older observations keep after one more examined proposal
HELD_BEFORE = 2.0  # examined proposals that the first expectation counts as
KEPT = 0.8  # weight that earlier requests' estimates keep after one more request
TRIAL = 2  # proposals in a round that tries a drafter again
MARGIN = 1.03  # gain that speculation must promise: estimates err, and rounds of different kinds disturb each other
ALPHAS, SHARES = 64, 16  # levels of acceptance, and of the share of rounds that propose
GAINS, MOST_GAIN = 8, 2.0  # levels of how siblings do beside what was measured, and the most of it that is believed
FORGET = 0.01  # of that, for each round without siblings: else what once did badly would never be tried again
NOTHING_ADDED = np.zeros((1, 1))  # to the time of a round without siblings
PAYBACK = 4  # rounds within which catching up must pay for a draft model that has fallen behind


class Estimate:
    """Estimates how many tokens a request gets out of a drafter's proposals; older rounds count less."""

    def __init__(self, acceptance: float, proposing: float, gain: float = 1.0) -> None:
        # Proposals accepted, proposals examined, rounds that proposed, all rounds.
        self._seen = [HELD_BEFORE * share for share in (acceptance, 1.0, proposing, 1.0)]
        self._siblings = [HELD_BEFORE * gain, HELD_BEFORE]  # that stood, and that were expected to
        self.pause = Pause()

    def observe(self, proposed: int, examined: int, accepted: int) -> None:
        fade, seen = FADE**examined, self._seen
        self._seen = [
            fade * seen[0] + accepted,
            fade * seen[1] + examined,
            FADE * seen[2] + (proposed > 0),
            FADE * seen[3] + 1,
        ]

    def observe_siblings(self, stood: bool, expected: float) -> None:
        """Learn from siblings beside a line that fell; one of them was `expected` to stand in this share of rounds."""
        seen = self._siblings
        self._siblings = [FADE * seen[0] + stood, FADE * seen[1] + expected]

    def forget_siblings(self) -> None:
        """Come a little closer to what was measured."""
        stood, expected = self._siblings
        self._siblings[0] = stood + FORGET * (expected - stood)

    def add(self, other: "Estimate") -> None:
        """Add another estimate; what was seen before it counts less."""
        self._seen = [KEPT * mine + theirs for mine, theirs in zip(self._seen, other._seen, strict=True)]
        self._siblings = [KEPT * mine + theirs for mine, theirs in zip(self._siblings, other._siblings, strict=True)]

    def doubt(self) -> None:
        """Halve the weight of the past, so that what comes next counts twice as much."""
        self._seen = [seen / 2 for seen in self._seen]

    @property
    def acceptance(self) -> float:
        return self._seen[0] / self._seen[1]

    @property
    def proposing(self) -> float:
        return self._seen[2] / self._seen[3]

    @property
    def gain(self) -> float:
        """How often siblings stood, relative to what was measured."""
        return min(self._siblings[0] / self._siblings[1], MOST_GAIN)

    @property
    def levels(self) -> "Levels":
        """Acceptance, share of rounds that propose, and gain of siblings, so coarse that choices can be reused."""
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


def tokens_of_siblings(levels: Levels, standing: Numbers, longest: int) -> Numbers:
    """Return what siblings add [S, K+1] to lines of K = 0 … longest that fall; so often [S] they were seen to stand."""
    falls = 1 - (levels[0] / ALPHAS) ** np.arange(longest + 1)
    added: Numbers = np.outer((standing * levels[2] / GAINS).clip(max=1.0), falls * levels[1] / SHARES)
    return added


class ByCosts(Chooser):
    """Holds what a controller has chosen for one request, from the drafters that it has estimates of."""

    def __init__(
        self, estimates: dict[str, Estimate], siblings: int, measured: Mapping[str, Mapping[int, float]]
    ) -> None:
        super().__init__()
        self.estimates = estimates
        self.siblings = siblings  # the most that it may have
        self._measured = measured  # how often siblings stand, by drafter and number
        self.best: str | None = None  # the drafter worth most to this request; None if none pays

    @property
    def drafters(self) -> Sequence[str]:
        return tuple(self.estimates)

    def observe(self, drafter: str, outcome: Outcome, entropies: Sequence[float], beside: Beside | None = None) -> None:
        estimate = self.estimates.get(drafter)
        if estimate is None:
            return
        of_line = outcome.stood - (beside is not None and beside.stood and outcome.kept > outcome.accepted)
        estimate.observe(outcome.proposed, outcome.examined, of_line)
        if beside is not None and (expected := self._measured[drafter].get(beside.siblings)):
            estimate.observe_siblings(beside.stood, expected)

    def choose(self, choice: "Choice") -> None:
        """Take the best drafter that the round pays for; once in a while try another, which may have become better."""
        k, self.best = choice.draft_length, None
        if not k:
            self._wanted = NOTHING
        elif len(self.estimates) == 1:
            [name] = self.estimates
            siblings = choice.beside(name, self.siblings)
            self._wanted = Wanted(k, name, siblings=siblings) if name in choice.drafters else NOTHING
        else:
            worth = {name: self._worth(name, choice) for name in choice.drafters if name in self.estimates}
            if not worth:
                self._wanted = NOTHING
                return
            self.best = chosen = max(worth, key=worth.__getitem__)
            for name, estimate in self.estimates.items():
                if estimate.pause.over and name != self.best:
                    chosen = name
            siblings = choice.beside(chosen, self.siblings)
            self._wanted = Wanted(k if chosen in choice.drafters else min(k, TRIAL), chosen, siblings=siblings)

    def _worth(self, name: str, choice: "Choice") -> float:
        k, levels = choice.draft_length, self.estimates[name].levels
        tokens = expected_tokens(levels, k)[k]
        if siblings := choice.beside(name, self.siblings):
            tokens += tokens_of_siblings(levels, np.array([self._measured[name][siblings]]), k)[0, k]
        return float(tokens)

    def count(self) -> None:
        """Count a round that has ended: all drafters but the best have waited one round more."""
        if self.siblings and not self._wanted.siblings:
            for estimate in self.estimates.values():
                estimate.forget_siblings()
        if self.best is not None:
            for name, estimate in self.estimates.items():
                if estimate.pause.over and name != self.best:
                    estimate.doubt()
                estimate.pause.count(used=name == self.best)


class Choice(NamedTuple):
    draft_length: int
    drafters: Sequence[str]  # each request takes the best of these
    siblings: int = 0  # beside lines of the drafter that hangs them
    hanger: str | None = None

    def beside(self, drafter: str, most: int) -> int:
        """Return the siblings of a request that takes this drafter and may have so many at most."""
        return self.siblings if drafter == self.hanger and self.siblings <= most else 0


# One request's levels for each drafter, and how many siblings it may have.
Known = tuple[tuple[tuple[str, Levels], ...], int]


class Controller:
    """One controller serves all live requests: a round has one width, so it chooses for all of them together."""

    def __init__(self, costs: Costs, longest: int) -> None:
        self.costs = costs
        self._longest = min(longest, costs.longest)
        self._times = lru_cache(maxsize=256)(lambda drafter, batch: np.array(costs.round_times(drafter, batch)))
        self._added = lru_cache(maxsize=256)(  # by each number of siblings [S, 1], none first
            lambda drafter, batch: np.array([[0.0], *([ms] for ms in costs.sibling_times(drafter, batch))])
        )
        self._best = lru_cache(maxsize=4096)(self._find_best)
        self._siblings = np.array([0, *costs.siblings])
        self._standing = {name: np.array([0.0, *shares]) for name, shares in costs.sibling_acceptance.items()}
        self._measured = {
            name: dict(zip(costs.siblings, shares, strict=True)) for name, shares in costs.sibling_acceptance.items()
        }
        self._pause = Pause()
        self._pays = False  # whether speculation was worth its cost when last chosen
        self.forget()

    def forget(self) -> None:
        """Forget earlier requests; expect new ones to behave as measured."""
        self._usual = {
            name: Estimate(self.costs.acceptance[name], self.costs.proposing[name]) for name in self.costs.acceptance
        }

    def begin(self, drafters: Sequence[str], siblings: int = 0) -> ByCosts:
        """Make the chooser of a new request, which expects each drafter to do as it did for the last requests."""
        usual = [(name, self._usual[name]) for name in drafters]
        estimates = {name: Estimate(one.acceptance, one.proposing, one.gain) for name, one in usual}
        return ByCosts(estimates, siblings, self._measured)

    def ended(self, chooser: Chooser) -> None:
        """Remember what a request that has ended got out of its drafters."""
        if isinstance(chooser, ByCosts):
            for name, estimate in chooser.estimates.items():
                self._usual[name].add(estimate)

    def choose(self, live: Sequence[Chooser], is_behind: Sequence[bool]) -> None:
        """Choose the next round for the requests that leave it open; `is_behind` says where the draft model is behind.

        A second call changes nothing: only `count` says that a round has ended.
        """
        free = _free(live)
        if not free:
            return
        known = tuple(
            (tuple((name, one.levels) for name, one in chooser.estimates.items()), chooser.siblings) for chooser in free
        )
        behind = sum(late for chooser, late in zip(live, is_behind, strict=True) if chooser in free)
        pinned = max((one.wanted.length for one in live if not isinstance(one, ByCosts)), default=0)
        choice = self._best(len(live), pinned, behind, known if len(known) == 1 else tuple(sorted(known)))
        self._pays = choice.draft_length > 0
        if self._pause.over and not self._pays:
            choice = Choice(min(TRIAL, self._longest), self._by_price(len(live), known))
        for chooser in free:
            chooser.choose(choice)

    def count(self, live: Sequence[Chooser]) -> None:
        """Count a round of these requests that has ended."""
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
        return sorted({name for of, _ in known for name, _ in of}, key=lambda name: self._times(name, batch)[1])

    def _find_best(self, batch: int, pinned: int, behind: int, known: Sequence[Known]) -> Choice:
        """Find the best K and price limit: a round that pays for one drafter may use all cheaper ones as well.

        Rows with a fixed length make the round at least `pinned` wide; the draft model is behind in `behind` rows.
        """
        lengths = np.arange(self._longest + 1).clip(pinned)
        expected = [{name: expected_tokens(levels, self._longest) for name, levels in of} for of, _ in known]
        by_price = self._by_price(batch, known)
        best, best_rate = Choice(0, ()), 0.0
        for count, dearest in enumerate(by_price, 1):
            times = self._times(dearest, batch)
            milliseconds = times[lengths.clip(max=len(times) - 1)]
            if DRAFTERS[dearest].needs_model:
                milliseconds[1:] += behind * (times[1] - times[0]) / PAYBACK
            hanger = next((name for name in by_price[:count] if name in self._standing), None)
            added = self._added(hanger, batch) if hanger else NOTHING_ADDED
            tokens = np.full((len(added), len(lengths)), float(batch - len(known)))  # the other rows: at least one each
            for of, (each, most) in zip(expected, known, strict=True):
                mine = [of[name] for name in by_price[:count] if name in of]
                best_line = np.maximum.reduce(mine) if mine else 1.0
                if hanger in of and most:
                    standing = np.where(self._siblings <= most, self._standing[hanger], 0.0)
                    with_siblings = of[hanger] + tokens_of_siblings(dict(each)[hanger], standing, self._longest)
                    best_line = np.maximum(best_line, with_siblings)
                tokens += best_line
            rates = tokens / (milliseconds + added * (lengths > 0))
            rates[self._siblings[: len(added), None] > MOST_SIBLINGS * np.arange(len(lengths))] = 0.0
            siblings, k = divmod(int(rates.argmax()), len(lengths))
            rate = float(rates[siblings, k])
            best_rate = best_rate or MARGIN * float(rates[0, 0])
            if rate > best_rate:
                best, best_rate = Choice(k, tuple(by_price[:count]), int(self._siblings[siblings]), hanger), rate
        return best


def _free(live: Sequence[Chooser]) -> list[ByCosts]:
    return [chooser for chooser in live if isinstance(chooser, ByCosts) and chooser.estimates]
