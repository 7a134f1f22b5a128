"""The core: it reads the prompts of new requests and runs one round after another for all live ones."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from sys import maxsize
from time import perf_counter

import torch
from torch import Tensor

from ..engines import PREFILL_WIDTH, RequestError
from .drafters import Drafter
from .lengths.chooser import BESIDE, Wanted
from .lengths.controller import Behind
from .lengths.drafting import DraftingRules
from .memory.cache import CacheFull
from .memory.model import Model
from .planning import Planner, Share, make_plan
from .prefill import DRAFT_BUDGET, Prefill
from .requests.metrics import Beside, Outcome, Speculation
from .requests.request import Request
from .round.capture import MOST_KINDS, Flight, Rounds
from .round.frame import Frame
from .round.plan import LEAST_WINDOW, Plan
from .round.result import RowResult
from .round.rows import BLOCK, Rows
from .seating import Occupant, Seating


class Scheduler:
    """Schedules a round, runs it, and gives its results to the requests; one thread at a time may call `step`."""

    def __init__(
        self,
        target: Model,
        drafts: Sequence[Model],
        drafters: Mapping[str, Drafter],
        rules: DraftingRules,
        max_batch: int,
        capacity: int,
        capture: bool,
        kept_blocks: int,
    ) -> None:
        self.target, self.drafts = target, drafts
        self.speculation = Speculation()
        self.frame: Frame | None = None  # of the last round
        self._drafters, self._rules = drafters, rules
        self._models = [target, *drafts]
        self._rows = Rows.allocate(max_batch, capacity, target.vocab_size, len(drafters), target.engine.device)
        self._planner = Planner(self._rows, drafters, target.vocab_size, target.engine.verify_width - 1, target.bucket)
        self.seating = Seating(self._rows, self._models, drafters.values(), rules, kept_blocks, self._planner.forget)
        self._prefill = Prefill(self._rows, drafts)
        self._frames: dict[object, Frame] = {}
        self._frames_of: list[int] = []  # cache versions that the frames were made for
        self._rounds = Rounds([model.engine for model in self._models] if capture else [])
        self._ahead: Flight | None = None  # a round launched before the previous one was read

    @property
    def live(self) -> list[Occupant]:
        """The requests that are decoding; occupant i has row i."""
        return self.seating.live

    def step(self) -> bool:
        """Admit and prefill what fits, run a round for all live requests; return False when nothing is left to do."""
        began = perf_counter()
        try:
            flight = self._schedule(began)
            if flight is not None:
                if flight.replayed:
                    self._launch_next(flight)
                self._post_process(flight, began)
                if self._ahead is not None and all(occupant.request.finished for occupant in self.live):
                    self._ahead = None  # no request needs its result
                if self._ahead is None:
                    self.seating.leave()
        except BaseException as error:
            self.abort(error)  # no row may be left half advanced
            raise
        return not self.seating.is_empty

    def forget_outputs(self) -> None:
        self.seating.prefixes.forget()
        for drafter in self._drafters.values():
            drafter.forget()
        if self._rules.controller is not None:
            self._rules.controller.forget()

    def close(self) -> None:
        """End every request and free all memory."""
        if self._ahead is not None:
            self._ahead.table()  # wait, because it still writes to that memory
        closed = RequestError("the decoder was closed before the request had ended; open another and submit it again")
        self.abort(closed)
        self.seating.end_waiting(closed)
        self._rounds.forget()
        self._frames.clear()
        self.frame = None
        for model in self._models:
            model.close()

    def abort(self, error: BaseException) -> None:
        """End every request that has a row with this error; later requests start on clean rows."""
        self._ahead = None
        self.seating.end_all(error)

    # Schedule.

    def _schedule(self, began: float) -> Flight | None:
        """Return the round of this step: the one in flight if rows and kind stay the same, else a new one."""
        if self._ahead is not None:
            self._choose()
            if self._steady():
                flight, self._ahead = self._ahead, None
                return flight
            flight, self._ahead = self._ahead, None
            self._post_process(flight, began)
        self.seating.leave()  # nothing is in flight: rows may move, join and leave
        self._read_prompts(PREFILL_WIDTH, DRAFT_BUDGET)
        return self._launch()

    def _read_prompts(self, budget: int, draft_budget: int) -> None:
        """Read prompts until so many tokens are spent, so that live rows never wait for long."""
        while budget > 0 and (self.seating.prefilling or self.seating.waiting):
            try:
                read, read_by_drafts = self._read_some(budget, draft_budget)
            except CacheFull as error:
                self.seating.preempt(error)
            else:
                budget, draft_budget = budget - read, draft_budget - read_by_drafts

    def _read_some(self, budget: int, draft_budget: int) -> tuple[int, int]:
        """Let the target read prompts in one call; return what that and the drafts have spent.

        With the last token of its prompt a request gets its first own. A prompt of one token is left to the first
        round. The draft reads later, between rounds; but a request whose text must depend on nothing else waits for it.
        """
        seating = self.seating
        while seating.admit():
            pass
        unread = {one.row: _entries_of_prompt(one.request) for one in seating.prefilling}
        if unscored := [one for one in seating.prefilling if one.request.unscored]:
            return self._prefill.score(self.target, unscored[0].request, unscored[0].row), 0
        fed, logits = self._prefill.read(self.target, unread, budget)
        whole = [one for one in seating.prefilling if self.target.cache.entries[one.row] == unread[one.row]]
        whole.sort(key=lambda one: one.row)
        for occupant in whole:
            seating.keep_prefix(occupant)
        begin = [one for one in whole if one.row in logits and not one.request.token_ids]
        for some in _neighbours(begin):
            self._first_tokens(some, logits)
        seating.leave(whole)
        whole = [one for one in whole if not one.request.finished]
        lacking = self._lacking([one for one in whole if one.request.params.keeps_its_draft])
        left = self._prefill.catch_up(lacking, draft_budget)
        for occupant in whole:
            own = lacking.get(occupant.row, {})
            if all(draft.cache.entries[occupant.row] >= entries for draft, entries in own.items()):
                seating.go_live(occupant)
        return fed or budget, draft_budget - left

    def _first_tokens(self, occupants: Sequence[Occupant], logits: Mapping[int, Tensor]) -> None:
        """Pick the tokens after the prompts of neighbouring rows, as a round without proposals does.

        The target has given the logits [1, V] of each row. Speculation does not count these tokens.
        """
        requests, share = [one.request for one in occupants], Share()
        plan = make_plan(
            [request.params for request in requests],
            [share] * len(requests),
            vocab_size=self.target.vocab_size,
            traced=any(request.trace is not None for request in requests),
        )
        self._refresh_uniforms(plan, occupants)
        given = torch.stack([logits[one.row][:, : self.target.vocab_size] for one in occupants])
        frame = self._frame_for(plan, prefilled=True)
        frame.target_logits.copy_(given)
        rows, span = self._rows.view(plan.batch, occupants[0].row), max(request.length for request in requests) + 1
        for occupant, result in zip(occupants, self._rounds.run(rows, plan, frame, span).results(), strict=True):
            self._give(occupant, share, result)
            occupant.request.report()

    def _follow(self, occupant: Occupant) -> None:
        """Make a new chooser, because the request now asks for something else."""
        occupant.drafting = occupant.request.drafting
        occupant.chooser = self._rules.chooser(occupant.drafting)

    def _choose(self) -> None:
        """Let each request choose what it drafts in the next round."""
        for occupant in self.live:
            if occupant.drafting is not occupant.request.drafting:
                self._follow(occupant)
        if self._rules.controller is not None:
            self._rules.controller.choose([occupant.chooser for occupant in self.live], self._behind)

    def _behind(self, row: int) -> Behind:
        """Say how much of a row its draft has not read: the one that it may use, or the first of all."""
        occupant = self.live[row]
        models = map(self._draft_of, occupant.chooser.drafters)
        draft = next((model for model in models if model is not None), next(iter(self.drafts), None))
        entries = 0 if draft is None else draft.cache.entries[row]
        return Behind(occupant.request.length - LEAST_WINDOW - entries, occupant.request.remaining)

    def _window(self, wanted: Sequence[Wanted]) -> int:
        """Return how many of a row's last tokens its draft reads first: all that a round commits where other lines may.

        Plans of TensorRT may be too narrow; there a draft reads what it lacks before the round.
        """
        if not any(BESIDE in one.drafter and self._windows(one) for one in wanted):  # nearly always
            return LEAST_WINDOW
        widest = max(LEAST_WINDOW, *(one.length + 1 for one in wanted))
        return LEAST_WINDOW if any(draft.engine.verify_width < widest for draft in self.drafts) else widest

    def _windows(self, wanted: Wanted, widest: int = LEAST_WINDOW) -> dict[Model, int]:
        """Return which draft models a row may run next, and how many tokens they read first, up to the `widest`."""
        sources = filter(None, map(self._drafters.get, wanted.names if wanted.length else ()))
        return {source.model: source.window(widest) for source in sources if source.model is not None}

    def _lacking(self, occupants: Sequence[Occupant], window: int = LEAST_WINDOW) -> dict[int, dict[Model, int]]:
        """Return by row how many entries each draft needs that it may run next, all but those that it reads first."""
        return {
            one.row: {
                draft: one.request.length - own for draft, own in self._windows(one.chooser.wanted, window).items()
            }
            for one in occupants
        }

    def _draft_of(self, drafter: str) -> Model | None:
        source = self._drafters.get(drafter)
        return None if source is None else source.model

    def _steady(self) -> bool:
        """Whether the next round has the same kind and rows, whatever the round in flight decides."""
        requests = [one.request for one in self.live]
        return (
            not self.seating.may_change
            and self._planner.repeats(requests, [one.chooser.wanted for one in self.live])
            and any(one.request.remaining > 1 for one in self.live)
        )

    # Run.

    def _launch(self) -> Flight | None:
        """Launch a round for the live rows, as many as there is memory for."""
        while self.live:
            try:
                return self._launch_for_all()
            except CacheFull as error:
                self.seating.preempt(error)
        return None

    def _launch_for_all(self) -> Flight:
        """Launch a round for the live rows as they are now."""
        self._choose()
        live = self.live
        requests = [occupant.request for occupant in live]
        wanted = [occupant.chooser.wanted for occupant in live]
        window = LEAST_WINDOW
        if any(one.length for one in wanted):
            window = self._window(wanted)
            never_behind = [one for one in live if one.request.params.keeps_its_draft]  # they lack a round's tokens
            self._prefill.catch_up(self._lacking(never_behind, window), maxsize)
            self._prefill.catch_up(self._lacking(live, window), DRAFT_BUDGET)
        plan = self._planner.plan(requests, wanted, window)
        lengths = [request.length for request in requests]
        span = max(lengths)
        assert self._planner.shares is not None
        # What a row has beyond its first line lies behind the longest line of all.
        lines = [plan.draft_length if plan.is_tree else share.length for share in self._planner.shares]
        widths = [length + plan.beyond + 1 for length in lines]
        self.target.cache.make_room(0, lengths, widths)
        for draft in plan.drafts:
            beyond = plan.beyond if plan.levels else 0
            draft.cache.make_room(0, lengths, [plan.draft_length + beyond + 1] * plan.batch)
        self._refresh_uniforms(plan, live)
        for source in plan.drafters:
            source.load(requests, plan.draft_length)
        self.frame = self._frame_for(plan)
        return self._rounds.launch(self._planner.view, plan, self.frame, span)

    def _launch_next(self, flight: Flight) -> None:
        """While a replay runs, launch the next round before reading it."""
        if self._steady():
            self._refresh_uniforms(flight.plan, self.live)
            assert self.frame is not None
            span = self._rows.tokens.shape[1]
            self._ahead = self._rounds.launch(self._planner.view, flight.plan, self.frame, span)

    def _refresh_uniforms(self, plan: Plan, occupants: Sequence[Occupant]) -> None:
        """Make the uniforms of a round that begins at the known length, or beyond it after a round in flight.

        All that a request may need of a block are made at once, and those of neighbours with the same lengths together.
        """
        if not plan.draws:
            return
        lacking: dict[range, list[Occupant]] = {}  # by the lengths
        for occupant in occupants:
            length, longest = occupant.request.length, occupant.request.longest
            for block in (length // BLOCK, (length + plan.draft_length + 1) // BLOCK):
                made, for_trees = occupant.uniform_blocks[block % 2]
                if made != block or (plan.is_tree and not for_trees):
                    occupant.uniform_blocks[block % 2] = block, plan.is_tree
                    lengths = range(max(length, block * BLOCK), min(longest, (block + 1) * BLOCK))
                    lacking.setdefault(lengths, []).append(occupant)
        for lengths, those in lacking.items():
            for some in _neighbours(those) if lengths else ():
                self._rows.fill_uniforms(some[0].row, len(some), lengths, plan.is_tree)

    def _frame_for(self, plan: Plan, prefilled: bool = False) -> Frame:
        versions = [model.cache.version for model in self._models]
        if versions != self._frames_of:
            self._frames.clear()
            self._rounds.forget()
            self._frames_of = versions
        key = (plan.steps, plan.live, prefilled)
        if len(self._frames) >= MOST_KINDS and key not in self._frames:
            self._frames.clear()
            self._rounds.forget()
        if key not in self._frames:
            self._frames[key] = Frame(plan, self.target, prefilled=prefilled)
        return self._frames[key]

    # Post-process.

    def _post_process(self, flight: Flight, began: float) -> None:
        """Give a round's results to its requests; a request that had already ended gets nothing."""
        shares = self._planner.shares
        assert shares is not None
        results = flight.results()
        if self._rules.controller is not None:
            self._rules.controller.count([one.chooser for one in self.live], [share.length for share in shares])
        decided = [
            (occupant, share, result)
            for occupant, share, result in zip(self.live, shares, results, strict=True)
            if not occupant.request.finished
        ]
        for occupant, share, result in decided:
            self._commit(occupant, share, result)
        times = flight.clock.parts()
        host_ms = max(0.0, 1e3 * (perf_counter() - began) - sum(times))  # below 0 if the round ran ahead
        for occupant, _, _ in decided:
            occupant.request.speculation.add_times(*times, host_ms)
            occupant.request.report()

    def _commit(self, occupant: Occupant, share: Share, result: RowResult) -> None:
        kept = self._give(occupant, share, result)
        stood = result.beside if share.siblings or share.tree else 0
        ended = stood > 0 and not share.tree  # with a sibling, which nothing follows
        outcome = Outcome(result.accepted if ended else result.proposed, result.accepted, kept)
        shape = share.tree or share.siblings
        fell = shape and (ended or result.accepted - stood < result.proposed)
        beside = Beside(shape, stood) if fell else None
        self.speculation.add_round(outcome, beside)
        occupant.request.speculation.add_round(outcome, beside)
        occupant.chooser.observe(share.drafter or "none", outcome, result.entropies[: outcome.examined], beside)

    def _give(self, occupant: Occupant, share: Share, result: RowResult) -> int:
        """Append a round's tokens to the request, and return how many it has kept."""
        request, row = occupant.request, occupant.row
        before = request.length
        kept = request.commit(result.tokens, result.accepted, result.logprobs)
        self.target.cache.wrote(row, before - 1, before + result.accepted)
        for source, _ in share.lines:
            if source.model is not None:  # it never saw its own last proposal, nor what stands of another line
                lost = share.beside or source in self._planner.run_twice
                own = 0 if lost else result.accepted - (result.beside if share.siblings else 0)  # siblings are not read
                begin = max(0, before - source.window(self._planner.window))
                source.model.cache.wrote(row, begin, before + min(own, result.proposed - 1))
        if request.trace is not None and result.trace is not None:
            traced = result.trace if share.entropy_limit is not None else replace(result.trace, entropies=())
            ended_early = kept <= result.accepted
            request.trace.append(replace(traced, accepted=kept, next_token=None) if ended_early else traced)
        return kept


def _neighbours(occupants: Sequence[Occupant]) -> Iterator[list[Occupant]]:
    """Those of rows that lie side by side, together."""
    for _, group in groupby(enumerate(occupants), lambda numbered: numbered[1].row - numbered[0]):
        yield [one for _, one in group]


def _entries_of_prompt(request: Request) -> int:
    """Return how many cache entries reading it gives: all, since its first token comes with them.

    A prompt of one token is left to the first round, as is the last token of a request that goes on.
    """
    return request.length - 1 if request.token_ids or request.length == 1 else request.length
