"""The core: it gives each request a row and runs one round after another for all live requests."""

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from weakref import WeakSet

from ..engines import PREFILL_WIDTH, RequestError
from .drafters import DRAFTERS, Drafter
from .lengths.chooser import Chooser
from .lengths.drafting import Drafting, DraftingRules
from .memory.model import Model
from .planning import Planner, Share
from .prefill import Prefill
from .requests.metrics import Outcome, Speculation
from .requests.request import Request, State
from .round.capture import Flight, Rounds
from .round.frame import Frame
from .round.plan import Plan
from .round.result import RowResult
from .round.rows import BLOCK, Rows


@dataclass(eq=False)
class Occupant:
    """A request that has a row, and the state that its rounds need."""

    request: Request
    drafting: Drafting  # what the chooser was made for
    chooser: Chooser
    uniform_blocks: list[int | None] = field(default_factory=lambda: [None, None])  # blocks whose uniforms are made

    @property
    def uses_model(self) -> bool:
        """Whether the chooser may ever want the draft model."""
        return any(DRAFTERS[name].needs_model for name in self.chooser.drafters)

    @property
    def wants_model(self) -> bool:
        wanted = self.chooser.wanted
        return wanted.length > 0 and DRAFTERS[wanted.drafter].needs_model


class Scheduler:
    """Live requests hold the first rows, the request being prefilled holds the next one, and the rest wait.

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
    ) -> None:
        self.target, self.draft, self.max_batch = target, draft, max_batch
        self.speculation = Speculation()
        self.live: list[Occupant] = []  # occupant i decodes in row i
        self.prefilling: Occupant | None = None
        self.waiting: deque[Request] = deque()
        self.frame: Frame | None = None  # of the last round
        self._drafters, self._rules = drafters, rules
        self._models = [model for model in (target, draft) if model is not None]
        self._rows = Rows.allocate(max_batch, capacity, target.vocab_size, len(drafters), target.engine.device)
        self._planner = Planner(self._rows, drafters, target.vocab_size)
        self._prefill = Prefill(self._rows, target, draft)
        self._frames: dict[object, Frame] = {}
        self._frames_of: list[int] = []  # cache versions that the frames were made for
        self._rounds = Rounds([model.engine for model in self._models] if capture else [])
        self._ahead: Flight | None = None  # a round launched before the previous one was read
        self._submitted: WeakSet[Request] = WeakSet()
        self._queue_lock = threading.Lock()

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
        ended = [*self.live, *([self.prefilling] if self.prefilling else [])]
        self.live.clear()
        self.prefilling, self._ahead = None, None
        self._planner.forget()
        for model in self._models:
            model.cache.entries = [0] * self.max_batch
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
        return self._launch() if self.live else None

    def _leave(self) -> None:
        """Free the rows of ended requests; the last live row moves into each freed place."""
        if self.prefilling is not None and self.prefilling.request.cancelled:
            self._free(self.prefilling, len(self.live))
            self.prefilling = None
        for row in reversed(range(len(self.live))):
            occupant = self.live[row]
            if occupant.request.finished or occupant.request.cancelled:
                self._free(occupant, row)
                self._planner.forget()
                last = self.live.pop()
                if row < len(self.live):
                    self.live[row] = last
                    self._move(len(self.live), row)
                if self.prefilling is not None:
                    self._move(len(self.live) + 1, len(self.live))

    def _free(self, occupant: Occupant, row: int) -> None:
        if not occupant.request.finished:
            occupant.request.finish("cancelled")
            occupant.request.report()
        for model in self._models:
            model.cache.entries[row] = 0
        for drafter in self._drafters.values():
            drafter.ended(occupant.request)
        if self._rules.controller is not None:
            self._rules.controller.ended(occupant.chooser)

    def _move(self, source: int, destination: int) -> None:
        self._rows.move(source, destination)
        for model in self._models:
            model.cache.move(source, destination)

    def _read_prompts(self, budget: int) -> None:
        """Feed at most `budget` prompt tokens, so that live rows never wait for a long prompt."""
        while budget > 0 and (self.prefilling is not None or self._admit()):
            assert self.prefilling is not None
            occupant, row = self.prefilling, len(self.live)
            self._follow(occupant)
            if fed := self._prefill.read_prompt(occupant.request, row, budget, occupant.uses_model):
                budget -= fed
            else:
                occupant.request.state = State.LIVE
                self.live.append(occupant)
                self.prefilling = None
                self._planner.forget()

    def _admit(self) -> bool:
        with self._queue_lock:
            if not self.waiting or len(self.live) == self.max_batch:
                return False
            request = self.waiting.popleft()
            drafting = request.drafting
            self.prefilling = Occupant(request, drafting, self._rules.chooser(drafting))
        request.state = State.PREFILLING
        self._rows.admit(len(self.live), request.prompt, request.params, request.seed, self.target.vocab_size)
        return True

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
        return (
            not (self.waiting and len(self.live) < self.max_batch)
            and self.prefilling is None
            and not any(one.request.finished or one.request.cancelled for one in self.live)
            and self._planner.repeats([one.chooser.wanted for one in self.live])
            and any(one.request.remaining > 1 for one in self.live)
        )

    # Run.

    def _launch(self) -> Flight:
        """Launch a round for the live rows as they are now."""
        self._choose()
        requests = [occupant.request for occupant in self.live]
        self._prefill.catch_up(requests, [occupant.wants_model for occupant in self.live])
        wanted = [occupant.chooser.wanted for occupant in self.live]
        plan = self._planner.plan(requests, wanted, self._draft_entries())
        span = max(request.length for request in requests)
        self.target.make_room(plan.batch, span + plan.draft_length + 1)
        if plan.with_model:
            assert self.draft is not None
            self.draft.make_room(plan.batch, span + plan.draft_length + 1)
        self._refresh_uniforms(plan)
        for source in plan.sources:
            source.load(requests, plan.draft_length)
        self.frame = self._frame_for(plan)
        return self._rounds.launch(self._planner.view, plan, self.frame, span)

    def _launch_next(self, flight: Flight) -> None:
        """If the round is a replay, launch the next one before reading it."""
        if flight.replayed and self._steady():
            self._refresh_uniforms(flight.plan)
            assert self.frame is not None
            span = self._rows.tokens.shape[1]
            self._ahead = self._rounds.launch(self._planner.view, flight.plan, self.frame, span)

    def _refresh_uniforms(self, plan: Plan) -> None:
        """Make the uniforms of a round that begins at the known length, or beyond it after a round in flight."""
        if not plan.rejection:
            return
        for row, occupant in enumerate(self.live):
            length = occupant.request.length
            for block in (length // BLOCK, (length + plan.draft_length + 1) // BLOCK):
                if occupant.uniform_blocks[block % 2] != block:
                    self._rows.fill_uniforms(row, block)
                    occupant.uniform_blocks[block % 2] = block

    def _frame_for(self, plan: Plan) -> Frame:
        versions = [model.cache.version for model in self._models]
        if versions != self._frames_of:
            self._frames.clear()
            self._rounds.forget()
            self._frames_of = versions
        key = (plan.batch, plan.draft_length, bool(plan.samplers), plan.with_model)
        if key not in self._frames:
            self._frames[key] = Frame(plan, self.target, self.draft)
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
            (row, occupant, share, result)
            for row, (occupant, share, result) in enumerate(zip(self.live, shares, results, strict=True))
            if not occupant.request.finished
        ]
        for row, occupant, share, result in decided:
            self._commit(row, occupant, share, result)
        times = flight.clock.parts()
        host_ms = max(0.0, 1e3 * (perf_counter() - began) - sum(times))  # below 0 if the round ran ahead
        for _, occupant, _, _ in decided:
            occupant.request.speculation.add_times(*times, host_ms)
            occupant.request.report()

    def _commit(self, row: int, occupant: Occupant, share: Share, result: RowResult) -> None:
        request = occupant.request
        before = request.length
        kept = request.commit(result.tokens, result.accepted, result.logprobs)
        self.target.cache.entries[row] = before + result.accepted
        if share.source is not None and share.source.needs_model:  # the draft never saw its own last proposal
            assert self.draft is not None
            self.draft.cache.entries[row] = before + min(result.accepted, result.proposed - 1)
        outcome = Outcome(result.proposed, result.accepted, kept)
        for speculation in (self.speculation, request.speculation):
            speculation.add_round(*outcome)
        occupant.chooser.observe(share.drafter or "none", outcome, result.entropies[: outcome.examined])
        if request.trace is not None and result.trace is not None:
            traced = result.trace if share.entropy_limit is not None else replace(result.trace, entropies=())
            ended_early = kept <= result.accepted
            request.trace.append(replace(traced, accepted=kept, next_token=None) if ended_early else traced)


def _fail(request: Request, error: BaseException) -> None:
    if not request.finished:
        request.fail(error)
        request.report()
