"""Gives the results of a round to its requests, and learns from them."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter
from weakref import WeakKeyDictionary

from ..lengths.drafting import DraftingRules
from ..memory.adapter_pool import Loaded
from ..memory.model import Model
from ..requests.metrics import Beside, Outcome, Speculation
from ..requests.request import failing
from ..round.result import RowResult
from ..state.asked import Share
from ..state.shapes import Shape
from .capture import LaunchedRound
from .occupants import Occupant
from .planning import Planner


class Results:
    """Gives each request what its rounds yield, and counts over all requests."""

    def __init__(self, target: Model, planner: Planner, rules: DraftingRules) -> None:
        self.speculation = Speculation()
        self.by_drafter: defaultdict[str, Speculation] = defaultdict(Speculation)  # of rounds that proposed
        self.by_adapter: WeakKeyDictionary[Loaded, Speculation] = WeakKeyDictionary()  # of requests that have one
        self._target, self._planner, self._rules = target, planner, rules

    def give_all(self, flight: LaunchedRound, live: Sequence[Occupant], began: float) -> None:
        """Give a round's results to its requests; a request that had already ended gets nothing."""
        shares = self._planner.shares
        assert shares is not None
        going = [row for row, occupant in enumerate(live) if not occupant.request.finished]
        decided = [(live[row], shares[row], one) for row, one in zip(going, flight.results(going), strict=True)]
        if self._rules.controller is not None:
            self._rules.controller.count([one.chooser for one in live], [share.length for share in shares])
        for occupant, share, result in decided:
            self.commit(occupant, share, result)
        times = flight.clock.parts()
        host_ms = max(0.0, 1e3 * (perf_counter() - began) - sum(times))  # below 0 if the round ran ahead
        for occupant, _, _ in decided:
            occupant.request.speculation.add_times(*times, host_ms)
            occupant.request.report()

    def search(self, occupant: Occupant) -> None:
        """Run a round of a search with beams, and end its request with the texts when it is done."""
        request, beaming = occupant.request, occupant.beaming
        assert beaming is not None
        with failing(request):
            if not beaming.search.done:
                shape = request.drafting.length
                assert isinstance(shape, Shape)
                outcome = beaming.round(occupant.row, shape)
                for counts in (self.speculation, request.speculation):
                    counts.add_round(outcome)
                if request.adapter is not None:
                    self.by_adapter.setdefault(request.adapter, Speculation()).add_round(outcome)
                if outcome.proposed:
                    self.by_drafter[request.drafting.drafter].add_round(outcome)
            if beaming.search.done:
                request.end_search([(one.tokens, float(one.score)) for one in beaming.search.best()])
        request.report()

    def commit(self, occupant: Occupant, share: Share, result: RowResult) -> None:
        before = occupant.request.length
        kept = self.give(occupant, share, result)
        self.note_writes(occupant.row, before, share, result)
        outcome = Outcome(result.proposed, result.accepted, kept)
        rejected = share.shape.beyond and (result.beside or result.accepted < result.proposed)
        beside = Beside(share.shape, result.beside) if rejected else None
        self.speculation.add_round(outcome, beside)
        if outcome.proposed:
            self.by_drafter[share.drafter].add_round(outcome, beside)
        occupant.request.speculation.add_round(outcome, beside)
        if occupant.request.adapter is not None:
            self.by_adapter.setdefault(occupant.request.adapter, Speculation()).add_round(outcome, beside)
        occupant.chooser.observe(share.drafter or "none", outcome, result.entropies[: outcome.examined], beside)

    def give(self, occupant: Occupant, share: Share, result: RowResult) -> int:
        """Append a round's tokens to the request, and return how many it has kept."""
        request = occupant.request
        kept = request.commit(result.tokens, result.accepted, result.logprobs)
        if request.trace is not None and result.trace is not None:
            traced = result.trace if share.entropy_limit is not None else replace(result.trace, entropies=())
            ended_early = kept <= result.accepted
            request.trace.append(replace(traced, accepted=kept, next_token=None) if ended_early else traced)
        return kept

    def note_writes(self, row: int, before: int, share: Share, result: RowResult) -> None:
        """Note what target and drafts hold of a row that had so many tokens `before` the round."""
        self._target.cache.wrote(row, before - 1, before + result.accepted)
        for name, _ in share.lines:
            drafter = self._planner.drafters[name]
            if drafter.model is not None:  # it never saw its own last proposal, nor what was accepted of another line;
                # a head has to see again what it has proposed itself
                lost = len(share.lines) > 1 or drafter in self._planner.run_twice or drafter.model.reads_again
                own = 0 if lost else result.accepted
                begin = max(0, before - drafter.window(self._planner.window))
                drafter.model.cache.wrote(row, begin, before + min(own, result.proposed - 1))
