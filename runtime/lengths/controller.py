"""Chooses draft length and drafter where a request leaves them open, for the most expected tokens per millisecond.

It learns only from proposals that were examined, never from one after a rejected proposal, and each round draws fresh
noise. So no choice can bias the output.
"""

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...engines import WIDEST_STEP
from ..drafters import DRAFTERS
from .beside import Numbers, Shapes
from .by_costs import ByCosts, Choice
from .chooser import TRIAL, Chooser, Pause
from .costs import Costs
from .estimate import HELD_BEFORE, Estimate, Levels, expected_tokens, tokens_beside

HELD_ALONE = 8.0  # examined proposals that the first expectation of the only drafter counts as: few say little of K
HELD_KNOWN = 20.0  # and if at least as many of earlier requests were examined
MARGIN = 1.02  # gain that speculation must promise: estimates err, and rounds of different kinds disturb each other
PAYBACK = 48  # tokens, at most, within which proposals must pay for what their draft model has to read first
ON_TRIALS = 0.01  # share of the time that trials may take where nothing pays
MOST_PATIENCE = 1024  # rounds after which a trial comes in any case
KEPT_ROUNDS = 4  # for which a choice that pays is kept while the same requests are live: choosing takes time, too
PRICES = 32  # levels of what there is to read, in rounds without proposals


class Unread(NamedTuple):
    """What the draft model has not read of a row."""

    tokens: int  # that it has to read before it can propose
    remaining: int  # that the request may still get


# One request's levels for each drafter, and how many proposals it may have beside its line.
Known = tuple[tuple[tuple[str, Levels], ...], int]


class Controller:
    """One controller serves all live requests: a round has one width, so it chooses for all of them together."""

    def __init__(self, costs: Costs, longest: int, growing: Collection[str] = (), most: int = WIDEST_STEP - 1) -> None:
        self.costs, self._most = costs, most  # proposals that the engine verifies
        self._longest = min(longest, costs.longest)
        self._shapes = Shapes.measured(costs, growing, self._longest)
        self._times = lru_cache(maxsize=256)(lambda drafter, batch: np.array(costs.round_times(drafter, batch)))
        self._round_ms = lru_cache(maxsize=256)(self._milliseconds)
        self._tokens = lru_cache(maxsize=4096)(self._tokens_of_row)
        self._best = lru_cache(maxsize=4096)(self._find_best)
        self._pause = Pause()
        self._settled: Sequence[ByCosts] = []  # those whose choice may be kept
        self._rounds_left = 0  # for which a choice that pays is kept
        self._tried: Sequence[ByCosts] = []  # those that took part in a trial in the last round
        self._pays = False  # whether speculation was worth its cost when last chosen
        self.forget()

    def forget(self) -> None:
        """Forget earlier requests; expect new ones to behave as measured."""
        self._usual: dict[str, Estimate] = {}  # by drafter
        self._with_adapters: WeakKeyDictionary[object, dict[str, Estimate]] = WeakKeyDictionary()  # while these exist

    def _usually(self, drafter: str, adapter: object) -> Estimate:
        """Return what is expected of a drafter where the target has this adapter, or none."""
        usual = self._usual if adapter is None else self._with_adapters.setdefault(adapter, {})
        if drafter not in usual:
            usual[drafter] = Estimate(self.costs.acceptance[drafter], self.costs.proposing[drafter])
        return usual[drafter]

    def begin(self, drafters: Sequence[str], beyond: int = 0, adapter: object = None) -> ByCosts:
        """Make the chooser of a new request, which expects each drafter to do as for the last with its adapter."""
        usual = [(name, self._usually(name, adapter)) for name in drafters]
        held = min(max(HELD_ALONE, usual[0][1].examined), HELD_KNOWN) if len(usual) == 1 else HELD_BEFORE
        estimates = {name: Estimate(one.acceptance, one.proposing, one.gain, held) for name, one in usual}
        return ByCosts(estimates, beyond, self._shapes, adapter)

    def ended(self, chooser: Chooser) -> None:
        """Remember what a request that has ended got out of its drafters."""
        if isinstance(chooser, ByCosts):
            for name, estimate in chooser.estimates.items():
                self._usually(name, chooser.adapter).add(estimate)

    def choose(self, live: Sequence[Chooser], unread_of: Callable[[int], Unread]) -> None:
        """Choose the next round for the requests that leave it open; `unread_of` says what a draft lacks of a row.

        A second call changes nothing: only `count` says that a round has ended. While the same requests are live and
        leave it open, a choice of one drafter that pays is kept for some rounds, unless all are accepted; where
        nothing pays it is kept until a trial is due, for rounds without proposals teach nothing.
        """
        if self._settled == live and not self._is_due(self._settled):
            return
        self._settled = []
        free, batch = _free(live), len(live)
        if not free:
            return
        known = tuple(
            (tuple((name, one.levels) for name, one in chooser.estimates.items()), chooser.beyond) for chooser in free
        )
        known = known if len(known) == 1 else tuple(sorted(known))
        pinned = max((one.wanted.length for one in live if not isinstance(one, ByCosts)), default=0)
        plain_ms = float(self._round_ms(self._by_price(batch, known)[0], None, batch, pinned)[0, 0])
        reading_ms, earned_ms = dict.fromkeys(free, 0.0), 0.0  # in all, and what each row's next token has to earn
        for row, chooser in enumerate(live):
            if chooser in reading_ms and (reader := _reader(chooser)):
                unread = unread_of(row)
                if unread.tokens > 0:
                    reading_ms[chooser] = self._reading_ms(reader, batch, unread.tokens)
                if chooser.token_ms is None:
                    chooser.token_ms = reading_ms[chooser] / max(1, unread.remaining)
                own_ms = reading_ms[chooser] / min(PAYBACK, max(1, unread.remaining))
                # While it is live, others in a crowd end, and those that follow them have as much to read.
                earned_ms += max(own_ms, (1 - 1 / batch) * chooser.token_ms)
        choice = self._best(batch, pinned, round(PRICES * earned_ms / plain_ms), known)
        self._pays = choice.draft_length > 0
        self._rounds_left = KEPT_ROUNDS
        chosen = dict.fromkeys(free, choice)
        triers: Sequence[ByCosts] = ()
        if not self._pays:
            trial = Choice(min(TRIAL, self._longest), self._by_price(batch, known))
            round_ms = float(self._round_ms(trial.drafters[-1], None, batch, pinned)[0, trial.draft_length])
            if sum(chooser.accepted for chooser in self._tried) * plain_ms / batch > round_ms - plain_ms:
                triers = [one for one in self._tried if one in reading_ms]  # it pays to go on
            triers = triers or self._triers(reading_ms, choice.trial_ms, ON_TRIALS * plain_ms)
            chosen |= dict.fromkeys(triers, trial)
        if len(free) == len(live) and not triers:  # what others ask for may change, and a trial is for one round
            self._settled = free
        for chooser in free:
            chooser.choose(chosen[chooser])

    def count(self, live: Sequence[Chooser], lengths: Sequence[int]) -> None:
        """Count a round of these requests that has ended, in which each had so many proposals at most.

        It may have been launched before the last choice.
        """
        self._tried = []
        if not (free := _free(live)):
            return
        if not self._pays:
            asked = {one for one, length in zip(live, lengths, strict=True) if length}
            self._tried = [one for one in free if one in asked]
        if self._tried and self._pause.over:  # from now on what comes counts more, for later requests, too
            tried = [one for chooser in self._tried for one in chooser.estimates.values()]
            usual = [one for one in self._usual.values() if one.examined > HELD_ALONE]
            for estimate in (*tried, *usual):
                estimate.doubt()
        if self._pays or self._tried or not self._pause.over:  # else the trial is still to come
            self._pause.count(used=self._pays)
        self._rounds_left -= 1
        for chooser in free:
            chooser.count()

    def _triers(self, reading_ms: dict[ByCosts, float], lost_ms: float, allowed_ms: float) -> list[ByCosts]:
        """Return which requests try again: none before the rounds since the last trial allow for one more.

        It is worth waiting until all can, because they share the width of the round. Where that would take too long,
        those with the least to read try alone.
        """
        first, every = ((lost_ms + some(reading_ms.values())) / allowed_ms for some in (min, sum))
        self._pause.least = every if every <= MOST_PATIENCE else min(first, MOST_PATIENCE)
        left_ms, triers = allowed_ms * self._pause.rounds - lost_ms, list[ByCosts]()
        for chooser in sorted(reading_ms, key=reading_ms.__getitem__) if self._pause.over else ():
            left_ms -= reading_ms[chooser]
            if left_ms >= 0 or not triers:
                triers.append(chooser)
        return triers

    def _is_due(self, settled: Sequence[ByCosts]) -> bool:
        """Whether there is something to choose, though the same requests are live as when it last chose."""
        if self._pays:
            all_accepted = all(one.accepted >= one.wanted.length for one in settled)  # so there may be more to be had
            return self._rounds_left <= 0 or all_accepted or any(len(one.estimates) > 1 for one in settled)
        return self._pause.over or any(one.has_learned for one in settled)

    def _by_price(self, batch: int, known: Sequence[Known]) -> list[str]:
        names = {name for of, _ in known for name, _ in of}
        return sorted(names, key=lambda name: (self._times(name, batch)[1], name))

    def _reading_ms(self, drafter: str, batch: int, tokens: int) -> float:
        """Return how long a drafter's model takes to read so many tokens of one row.

        Where that was not measured, it is taken to be what the first proposal adds to a round.
        """
        times, parts = self._times(drafter, batch), self.costs.reading_ms.get(drafter)
        return float(times[1] - times[0]) if parts is None else parts[0] + parts[1] * tokens

    def _find_best(self, batch: int, pinned: int, late: int, known: Sequence[Known]) -> Choice:
        """Find the best K and price limit: a round that pays for one drafter may use all cheaper ones as well.

        Rows with a fixed length make the round at least `pinned` wide; what drafts have to read first costs `late` of
        the PRICES of a round for each token of a row.
        """
        by_price, trial = tuple(self._by_price(batch, known)), min(TRIAL, self._longest)
        best, best_rate, trial_ms = Choice(0, ()), 0.0, 0.0
        for count, dearest in enumerate(by_price, 1):
            hanger = next((name for name in by_price[:count] if name in self._shapes.accepted), None)
            milliseconds = self._round_ms(dearest, hanger, batch, pinned)
            tokens = np.full(milliseconds.shape, float(batch - len(known)))  # the other rows: at least one each
            for row in known:
                tokens += self._tokens(row, by_price[:count], hanger)
            plain_ms = float(milliseconds[0, 0])
            trial_ms = float(milliseconds[0, trial] - tokens[0, trial] / batch * plain_ms)
            if late and any(DRAFTERS[name].needs_model for name in by_price[:count]):
                milliseconds = milliseconds.copy()
                milliseconds[:, 1:] += late / PRICES * plain_ms * tokens[:, 1:] / batch
            rates = tokens / milliseconds
            shape, k = divmod(int(rates.argmax()), self._longest + 1)
            rate = float(rates[shape, k])
            best_rate = best_rate or MARGIN * float(rates[0, 0])
            if rate > best_rate:
                best, best_rate = Choice(k, by_price[:count], shape, hanger), rate
        return best._replace(trial_ms=trial_ms)

    def _milliseconds(self, drafter: str, hanger: str | None, batch: int, pinned: int) -> Numbers:
        """Return how long a round takes by shape and K [S, K+1]; infinity where the engine cannot run it."""
        lengths, shapes = np.arange(self._longest + 1).clip(pinned), self._shapes
        times = self._times(drafter, batch)
        milliseconds: Numbers = times[lengths.clip(max=len(times) - 1)] + np.zeros(shapes.fits.shape)
        if hanger:
            added = np.array([[0.0], *([ms] for ms in self.costs.times_beside(hanger, batch))])
            milliseconds += added * (lengths > 0)
        milliseconds[~(shapes.fits & (lengths + shapes.beyond[:, None] <= self._most))] = np.inf
        return milliseconds

    def _tokens_of_row(self, row: Known, names: Sequence[str], hanger: str | None) -> Numbers:
        """Return how many tokens a row is expected to get from the best of these drafters, by shape and K."""
        (of, most), longest = (dict(row[0]), row[1]), self._longest
        lines = [expected_tokens(of[name], longest) for name in names if name in of]
        tokens: Numbers = np.maximum.reduce(lines) if lines else np.ones(1)
        if hanger in of and most:
            beside = tokens_beside(of[hanger], self._shapes, hanger, most, longest)
            tokens = np.maximum(tokens, expected_tokens(of[hanger], longest) + beside)
        return tokens


def _reader(chooser: Chooser) -> str | None:
    """Return the first of its drafters that runs a model, for which tokens are read."""
    return next((name for name in chooser.drafters if DRAFTERS[name].needs_model), None)


def _free(live: Sequence[Chooser]) -> list[ByCosts]:
    return [chooser for chooser in live if isinstance(chooser, ByCosts) and chooser.estimates]
