"""The core: it gives each request a row and runs one round after another for all live requests."""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from weakref import WeakSet

from torch import Tensor

from ..engines import BLOCK_TOKENS, PREFILL_WIDTH, RequestError
from .drafters import DRAFTERS, Drafter
from .lengths.chooser import Chooser
from .lengths.drafting import Drafting, DraftingRules
from .memory.budget import Budget
from .memory.cache import CacheFull
from .memory.model import Model
from .memory.prefixes import Prefixes
from .planning import Planner, Share, make_plan
from .prefill import NARROWEST, Prefill
from .requests.metrics import Outcome, Speculation
from .requests.request import Request, State
from .round.capture import Flight, Rounds
from .round.frame import Frame
from .round.plan import Plan
from .round.result import RowResult
from .round.rows import BLOCK, Rows
from .sampling.filters.grammar import seat


@dataclass(eq=False)
class Occupant:
    """A request that has a row, and the state that its rounds need."""

    request: Request
    drafting: Drafting  # what the chooser was made for
    chooser: Chooser
    row: int
    number: int  # the younger, the higher
    keys: list[bytes] = field(default_factory=list)  # of its blocks of tokens
    uniform_blocks: list[int | None] = field(default_factory=lambda: [None, None])  # blocks whose uniforms are made

    @property
    def wants_model(self) -> bool:
        wanted = self.chooser.wanted
        return wanted.length > 0 and DRAFTERS[wanted.drafter].needs_model


class Scheduler:
    """Live requests hold the first rows, those whose prompts are being read the next ones, and the rest wait.

    `submit` and `cancel` may be called from any thread; `step` from one at a time.
    """

    def __init__(
        self,
        target: Model,
        draft: Model | None,
        drafters: Mapping[str, Drafter],
        rules: DraftingRules,
        max_batch: int,
        capacity: int,
        capture: bool,
        kept_blocks: int,
    ) -> None:
        self.target, self.draft, self.max_batch = target, draft, max_batch
        self.speculation = Speculation()
        self.live: list[Occupant] = []  # occupant i decodes in row i
        self.prefilling: list[Occupant] = []  # in the order of their arrival
        self.waiting: deque[Request] = deque()
        self.frame: Frame | None = None  # of the last round
        self._drafters, self._rules = drafters, rules
        self._models = [model for model in (target, draft) if model is not None]
        self._budget = Budget([model.cache for model in self._models])
        self.prefixes = Prefixes([model.cache for model in self._models], kept_blocks)
        self._rows = Rows.allocate(max_batch, capacity, target.vocab_size, len(drafters), target.engine.device)
        self._planner = Planner(self._rows, drafters, target.vocab_size, target.bucket)
        self._prefill = Prefill(self._rows, draft)
        self._frames: dict[object, Frame] = {}
        self._frames_of: list[int] = []  # cache versions that the frames were made for
        self._rounds = Rounds([model.engine for model in self._models] if capture else [])
        self._ahead: Flight | None = None  # a round launched before the previous one was read
        self._submitted: WeakSet[Request] = WeakSet()
        self._queue_lock = threading.Lock()
        self._admitted = 0
        self._most_rows = max_batch  # fewer for as long as memory has run out

    def submit(self, request: Request) -> None:
        with self._queue_lock:
            self._submitted.add(request)
            self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        with self._queue_lock:
            if request not in self._submitted:
                raise RequestError("the request belongs to another decoder; cancel it there")
            if request in self.waiting:
                self.waiting.remove(request)
                request.finish("cancelled")
            request.cancelled = True

    def step(self) -> bool:
        """Admit and prefill what fits, run a round for all live requests; return False when nothing is left to do."""
        began = perf_counter()
        try:
            flight = self._schedule(began)
            if flight is not None:
                self._launch_next(flight)
                self._post_process(flight, began)
                if all(occupant.request.finished for occupant in self.live):
                    self._ahead = None  # no request needs its result
                if self._ahead is None:
                    self._leave()
        except BaseException as error:
            self.abort(error)  # no row may be left half advanced
            raise
        return bool(self.live or self.prefilling or self.waiting)

    def forget_outputs(self) -> None:
        self.prefixes.forget()
        for drafter in self._drafters.values():
            drafter.forget()
        if self._rules.controller is not None:
            self._rules.controller.forget()

    def close(self) -> None:
        """End every request and free all memory."""
        if self._ahead is not None:
            self._ahead.table()  # wait, because it still writes to that memory
        closed = RequestError("the decoder was closed before the request had ended; open another and submit it again")
        with self._queue_lock:
            waiting = list(self.waiting)
            self.waiting.clear()
        self.abort(closed)
        for request in waiting:
            _fail(request, closed)
        self._rounds.forget()
        self._frames.clear()
        self.frame = None
        for model in self._models:
            model.close()

    def abort(self, error: BaseException) -> None:
        """End every request that has a row with this error; later requests start on clean rows."""
        ended = [*self.live, *self.prefilling]
        self.live.clear()
        self.prefilling.clear()
        self._ahead = None
        self._planner.forget()
        for model in self._models:
            model.cache.clear()
        self.prefixes.forget()
        for occupant in ended:
            _fail(occupant.request, error)

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
        self._leave()  # nothing is in flight: rows may move, join and leave
        self._read_prompts(PREFILL_WIDTH)
        return self._launch()

    def _leave(self) -> None:
        """Free the rows of ended requests; the last row of the same state moves into each freed place."""
        self._leave_prefill()
        for row in reversed(range(len(self.live))):
            occupant = self.live[row]
            if occupant.request.finished or occupant.request.cancelled:
                self._free(occupant)
                self._close_up(occupant)

    def _close_up(self, freed: Occupant) -> None:
        """Move the last live row into one that is free, and another into its place."""
        self._planner.forget()
        last = self.live.pop()
        if last is not freed:
            self.live[freed.row] = last
            self._move(last, freed.row)
        self._fill(len(self.live))

    def _leave_prefill(self) -> None:
        for occupant in [one for one in self.prefilling if one.request.finished or one.request.cancelled]:
            self._free(occupant)
            self.prefilling.remove(occupant)
            self._fill(occupant.row)

    def _fill(self, row: int) -> None:
        """Move the last of the rows whose prompts are being read into a place among them that is free."""
        last = max(self.prefilling, key=lambda one: one.row, default=None)
        if last is not None and last.row > row:
            self._move(last, row)

    def _free(self, occupant: Occupant) -> None:
        if not occupant.request.finished:
            occupant.request.finish("cancelled")
            occupant.request.report()
        self._most_rows = self.max_batch
        self._leave_prefix(occupant)
        for model in self._models:
            model.cache.free(occupant.row)
        for drafter in self._drafters.values():
            drafter.ended(occupant.request)
        if self._rules.controller is not None:
            self._rules.controller.ended(occupant.chooser)

    def _preempt(self, error: CacheFull) -> None:
        """Let the youngest request give up its place: it waits again, and goes on with the same text.

        One that is alone ends with the error.
        """
        with_rows = [*self.live, *self.prefilling]
        youngest = max(with_rows, key=lambda one: one.number)
        if len(with_rows) == 1:
            _fail(youngest.request, error)
            self._leave()
            return
        youngest.request.state = State.WAITING
        with self._queue_lock:
            self.waiting.appendleft(youngest.request)
        for model in self._models:
            model.cache.free(youngest.row)
        if youngest in self.prefilling:
            self.prefilling.remove(youngest)
            self._fill(youngest.row)
        else:
            self._close_up(youngest)
        self._most_rows = len(with_rows) - 1

    def _leave_prefix(self, occupant: Occupant) -> None:
        """Keep what the caches have of a request for others that begin alike."""
        request = occupant.request
        self.prefixes.extend(occupant.keys, (*request.prompt, *request.token_ids), request.cache_salt)
        for model in self._models:
            self.prefixes.leave(model.cache, occupant.row, occupant.keys)

    def _reuse_prefix(self, occupant: Occupant) -> None:
        """Begin with what an earlier request has left, but for an end that is read as it would be without."""
        request, row = occupant.request, occupant.row
        if request.unscored:
            return  # all of its prompt is read for log-probabilities first
        tokens = (*request.prompt, *request.token_ids)
        self.prefixes.extend(occupant.keys, tokens, request.cache_salt)
        most = max(0, len(tokens) - NARROWEST) // BLOCK_TOKENS
        for model in self._models:
            self.prefixes.reuse(model.cache, row, occupant.keys[:most])
        request.cached_tokens = min(len(request.prompt), self.target.cache.entries[row])
        self.prefixes.asked_tokens += len(request.prompt)
        self.prefixes.found_tokens += request.cached_tokens

    def _move(self, occupant: Occupant, row: int) -> None:
        self._rows.move(occupant.row, row)
        for model in self._models:
            model.cache.move(occupant.row, row)
        occupant.row = row

    def _read_prompts(self, budget: int) -> None:
        """Let the target read prompts until `budget` tokens are spent, so that live rows never wait for long.

        With the last token of its prompt a request gets its first own. What the draft has to read comes after that. A
        prompt of one token is left to the first round.
        """
        while budget > 0:
            try:
                while self._admit():
                    pass
                unread = {one.row: _entries_of_prompt(one.request) for one in self.prefilling}
                if unscored := [one for one in self.prefilling if one.request.unscored]:
                    budget -= self._prefill.score(self.target, unscored[0].request, unscored[0].row)
                    continue
                fed, logits = self._prefill.read(self.target, unread, budget)
            except CacheFull as error:
                self._preempt(error)
                continue
            budget -= fed or budget
            whole = [one for one in self.prefilling if self.target.cache.entries[one.row] == unread[one.row]]
            for occupant in sorted(whole, key=lambda one: one.row):
                self._leave_prefix(occupant)
                if occupant.row in logits and not occupant.request.token_ids:
                    self._first_token(occupant, logits[occupant.row])
            self._leave_prefill()
            for occupant in whole:
                if not occupant.request.finished:
                    self._go_live(occupant)

    def _admit(self) -> bool:
        row = len(self.live) + len(self.prefilling)
        with self._queue_lock:
            if not self.waiting or row >= self._most_rows or not self._has_memory(self.waiting[0]):
                return False
            request = self.waiting.popleft()
            drafting = request.drafting
            self._admitted += 1
            occupant = Occupant(request, drafting, self._rules.chooser(drafting), row, self._admitted)
            self.prefilling.append(occupant)
        request.state = State.PREFILLING
        self._rows.admit(row, request.prompt, request.params, request.seed, self.target.vocab_size)
        if request.token_ids:  # it had given up its place
            self._rows.resume(row, request.params, request.token_ids)
        seat(self._rows.columns, row, request.guide)
        self._reuse_prefix(occupant)
        return True

    def _has_memory(self, *joining: Request) -> bool:
        """Whether these requests fit beside those that have rows, however long all of them become."""
        together = [*(occupant.request for occupant in (*self.live, *self.prefilling)), *joining]
        return self._budget.admits([request.longest for request in together])

    def _first_token(self, occupant: Occupant, logits: Tensor) -> None:
        """Pick the token after the prompt, whose logits [1, V] the target has given, as a round without proposals does.

        Speculation does not count it.
        """
        request, share, row = occupant.request, Share(), occupant.row
        plan = make_plan([request.params], [share], vocab_size=self.target.vocab_size, traced=request.trace is not None)
        self._refresh_uniforms(plan, [occupant])
        frame = self._frame_for(plan, prefilled=True)
        frame.target_logits[0].copy_(logits[:, : self.target.vocab_size])
        flight = self._rounds.run(self._rows.view(1, row), plan, frame, request.length + 1)
        [result] = flight.results()
        self._give(occupant, share, result)
        request.report()

    def _go_live(self, occupant: Occupant) -> None:
        """Let a request take part in the rounds, in the row behind the live ones."""
        self.prefilling.remove(occupant)
        row = len(self.live)
        if occupant.row != row:
            [other] = [one for one in self.prefilling if one.row == row]
            self._rows.swap(occupant.row, row)
            for model in self._models:
                model.cache.swap(occupant.row, row)
            occupant.row, other.row = row, occupant.row
        occupant.request.state = State.LIVE
        self.live.append(occupant)
        self._planner.forget()

    def can_hold(self, length: int) -> bool:
        """Whether the caches can ever hold a request that becomes this long."""
        return self._budget.admits([length])

    def _follow(self, occupant: Occupant) -> None:
        """Make a new chooser if the request now asks for something else."""
        if occupant.drafting is not occupant.request.drafting:
            occupant.drafting = occupant.request.drafting
            occupant.chooser = self._rules.chooser(occupant.drafting)

    def _choose(self) -> None:
        """Let each request choose what it drafts in the next round."""
        for occupant in self.live:
            self._follow(occupant)
        if self._rules.controller is not None:
            entries = self._draft_entries()
            behind = [one.request.length - 2 > count for one, count in zip(self.live, entries, strict=True)]
            self._rules.controller.choose([occupant.chooser for occupant in self.live], behind)

    def _draft_entries(self) -> list[int]:
        return [0] * len(self.live) if self.draft is None else self.draft.cache.entries[: len(self.live)]

    def _steady(self) -> bool:
        """Whether the next round has the same kind and rows, whatever the round in flight decides."""
        requests = [one.request for one in self.live]
        return (
            not (self.waiting and len(self.live) < self._most_rows)
            and not self.prefilling
            and not any(one.request.finished or one.request.cancelled for one in self.live)
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
                self._preempt(error)
        return None

    def _launch_for_all(self) -> Flight:
        """Launch a round for the live rows as they are now."""
        self._choose()
        requests = [occupant.request for occupant in self.live]
        self._prefill.catch_up(requests, [occupant.wants_model for occupant in self.live])
        wanted = [occupant.chooser.wanted for occupant in self.live]
        plan = self._planner.plan(requests, wanted, self._draft_entries())
        lengths = [request.length for request in requests]
        span = max(lengths)
        assert self._planner.shares is not None
        self.target.cache.make_room(0, lengths, [share.length + 1 for share in self._planner.shares])
        if plan.with_model:
            assert self.draft is not None
            self.draft.cache.make_room(0, lengths, [plan.draft_length + 1] * plan.batch)
        self._refresh_uniforms(plan, self.live)
        for source in plan.sources:
            source.load(requests, plan.draft_length)
        self.frame = self._frame_for(plan)
        return self._rounds.launch(self._planner.view, plan, self.frame, span)

    def _launch_next(self, flight: Flight) -> None:
        """If the round is a replay, launch the next one before reading it."""
        if flight.replayed and self._steady():
            self._refresh_uniforms(flight.plan, self.live)
            assert self.frame is not None
            span = self._rows.tokens.shape[1]
            self._ahead = self._rounds.launch(self._planner.view, flight.plan, self.frame, span)

    def _refresh_uniforms(self, plan: Plan, occupants: Sequence[Occupant]) -> None:
        """Make the uniforms of a round that begins at the known length, or beyond it after a round in flight."""
        if not plan.rejection:
            return
        for occupant in occupants:
            length = occupant.request.length
            for block in (length // BLOCK, (length + plan.draft_length + 1) // BLOCK):
                if occupant.uniform_blocks[block % 2] != block:
                    self._rows.fill_uniforms(occupant.row, block)
                    occupant.uniform_blocks[block % 2] = block

    def _frame_for(self, plan: Plan, prefilled: bool = False) -> Frame:
        versions = [model.cache.version for model in self._models]
        if versions != self._frames_of:
            self._frames.clear()
            self._rounds.forget()
            self._frames_of = versions
        key = (plan.batch, plan.draft_length, plan.live, bool(plan.samplers), plan.with_model, prefilled)
        if key not in self._frames:
            self._frames[key] = Frame(plan, self.target, self.draft, prefilled=prefilled)
        return self._frames[key]

    # Post-process.

    def _post_process(self, flight: Flight, began: float) -> None:
        """Give a round's results to its requests; a request that had already ended gets nothing."""
        shares = self._planner.shares
        assert shares is not None
        results = flight.results()
        if self._rules.controller is not None:
            self._rules.controller.count([occupant.chooser for occupant in self.live])
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
        outcome = Outcome(result.proposed, result.accepted, kept)
        for speculation in (self.speculation, occupant.request.speculation):
            speculation.add_round(*outcome)
        occupant.chooser.observe(share.drafter or "none", outcome, result.entropies[: outcome.examined])

    def _give(self, occupant: Occupant, share: Share, result: RowResult) -> int:
        """Append a round's tokens to the request, and return how many it has kept."""
        request, row = occupant.request, occupant.row
        before = request.length
        kept = request.commit(result.tokens, result.accepted, result.logprobs)
        self.target.cache.entries[row] = before + result.accepted
        if share.source is not None and share.source.needs_model:  # the draft never saw its own last proposal
            assert self.draft is not None
            self.draft.cache.entries[row] = before + min(result.accepted, result.proposed - 1)
        if request.trace is not None and result.trace is not None:
            traced = result.trace if share.entropy_limit is not None else replace(result.trace, entropies=())
            ended_early = kept <= result.accepted
            request.trace.append(replace(traced, accepted=kept, next_token=None) if ended_early else traced)
        return kept


def _entries_of_prompt(request: Request) -> int:
    """Return how many cache entries reading it gives: all, since its first token comes with them.

    A prompt of one token is left to the first round, as is the last token of a request that goes on.
    """
    return request.length - 1 if request.token_ids or request.length == 1 else request.length


def _fail(request: Request, error: BaseException) -> None:
    if not request.finished:
        request.fail(error)
        request.report()
