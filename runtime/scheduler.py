"""The core: which request has which row, what is prefilled when, and one round for all that are live."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from math import inf
from time import perf_counter

import torch

from ..engines import PREFILL_WIDTH
from .drafters.ngram import NGrams
from .drafters.propose import SOURCES, WITH_MODEL
from .drafters.suffix import Suffixes
from .lengths.controller import Controller
from .memory.model import Model
from .requests.metrics import Outcome, Speculation
from .requests.request import Request, State
from .round.capture import Flight, Rounds
from .round.frame import Frame
from .round.result import RowResult
from .round.rows import BLOCK, Plan, Rows
from .sampling.params import SamplingParams

Source = tuple[int, str, float | None]  # how many proposals of a row, from where, and the entropy they end at


class Scheduler:
    """Live rows are dense, the request being prefilled follows them, the rest waits.

    `submit` and `cancel` may be called from any thread; `step` from one at a time.
    """

    def __init__(
        self,
        target: Model,
        draft: Model | None,
        ngrams: NGrams | None,
        max_batch: int,
        capacity: int,
        capture: bool,
        controller: Controller | None = None,
    ) -> None:
        self.target, self.draft, self.ngrams, self._controller = target, draft, ngrams, controller
        self.max_batch = max_batch
        self.speculation = Speculation()
        self.live: list[Request] = []  # request i decodes in row i
        self.prefilling: Request | None = None
        self.waiting: deque[Request] = deque()
        self.rows = Rows.allocate(max_batch, capacity, target.vocab_size, target.engine.device)
        self._suffixes = Suffixes()
        self._plan: Plan | None = None
        self.frame: Frame | None = None  # of the last round
        self._frames: dict[tuple[int, int, bool, bool, bool], Frame] = {}
        self._rounds = Rounds([model.engine for model in (target, draft) if model is not None] if capture else [])
        self._ahead: Flight | None = None  # launched before the round it follows was read
        self._view = self.rows.view(0)  # the live rows of the plan
        self._plan_key: tuple[Source, ...] = ()
        self._queue_lock = threading.Lock()

    def submit(self, request: Request) -> None:
        with self._queue_lock:
            self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        with self._queue_lock:
            if request in self.waiting:
                self.waiting.remove(request)
                request.finish("cancelled")
            request.cancelled = True

    def step(self) -> bool:
        """Admit and prefill what fits, run one round for all live requests; False when nothing is left to do."""
        try:
            began = perf_counter()
            if self._ahead is not None:
                self._choose()
                if not self._steady():
                    self._end(self._ahead, began)
                    began, self._ahead = perf_counter(), None
            if self._ahead is None:  # rows may move, join and leave
                self._leave()
                self._prefill(PREFILL_WIDTH)
            if self.live:
                self._round(began)
        except BaseException:
            self.abort()  # no row may be left half advanced
            raise
        return bool(self.live or self.prefilling or self.waiting)

    def forget_outputs(self) -> None:
        self._suffixes = Suffixes()

    def close(self) -> None:
        """End every request and let go of all memory."""
        if self._ahead is not None:
            self._ahead.table()  # it writes to that memory
        self.abort()
        self._rounds.forget()
        self._frames.clear()
        self.frame = None
        for model in (self.target, self.draft):
            if model is not None:
                model.close()

    def abort(self) -> None:
        """End every request; the next one starts on clean rows."""
        with self._queue_lock:
            ended = [*self._occupants(), *self.waiting]
            self.waiting.clear()
        for request in ended:
            if not request.finished:
                request.finish("cancelled")
        self.live.clear()
        self.prefilling, self._plan, self._ahead = None, None, None

    def _occupants(self) -> list[Request]:
        return [*self.live, *([self.prefilling] if self.prefilling else [])]

    def _leave(self) -> None:
        """Give up the rows of requests that have ended; the last live row takes each freed place."""
        if self.prefilling is not None and self.prefilling.cancelled:
            self.prefilling.finish("cancelled")
            self.prefilling = None
        for row in reversed(range(len(self.live))):
            request = self.live[row]
            if request.cancelled and not request.finished:
                request.finish("cancelled")
            if request.finished:
                if request.context is not None:
                    self._suffixes.remember(request)
                self._plan = None
                last = self.live.pop()
                if row < len(self.live):
                    self.live[row] = last
                    self._move(last, len(self.live), row)
                if self.prefilling is not None:
                    self._move(self.prefilling, len(self.live) + 1, len(self.live))

    def _move(self, request: Request, source: int, destination: int) -> None:
        self.rows.move(source, destination)
        self.target.cache.move(source, destination, request.target_entries)
        if self.draft is not None:
            self.draft.cache.move(source, destination, request.draft_entries)

    def _prefill(self, budget: int) -> None:
        """Feed prompts to the models, at most `budget` tokens, so that live rows never wait for a long prompt."""
        while budget > 0:
            if self.prefilling is None and not self._admit():
                return
            request = self.prefilling
            assert request is not None
            row = len(self.live)
            wanted_by_target = len(request.prompt) - 1
            wanted_by_draft = len(request.prompt) - 2 if request.may_draft_with_model else 0
            if request.target_entries < wanted_by_target:
                chunk = min(budget, wanted_by_target - request.target_entries)
                self._feed(self.target, row, request.target_entries, chunk)
                request.target_entries += chunk
            elif self.draft is not None and request.draft_entries < wanted_by_draft:
                chunk = min(budget, wanted_by_draft - request.draft_entries)
                self._feed(self.draft, row, request.draft_entries, chunk)
                request.draft_entries += chunk
            else:
                request.state = State.LIVE
                self.live.append(request)
                self.prefilling, self._plan = None, None
                continue
            budget -= chunk

    def _admit(self) -> bool:
        with self._queue_lock:
            if not self.waiting or len(self.live) == self.max_batch:
                return False
            request = self.waiting.popleft()
            self.prefilling = request
        request.state = State.PREFILLING
        self.rows.admit(len(self.live), list(request.prompt), request.params, request.seed, self.target.vocab_size)
        return True

    def _feed(self, model: Model, row: int, start: int, count: int) -> None:
        """Write `count` cache entries of a row from its committed tokens."""
        self._make_room(model, row + 1, start + count)
        model.prefill(row, self.rows.tokens[row, start : start + count], start)

    def _make_room(self, model: Model, rows: int, capacity: int) -> None:
        """Before a call that writes below `capacity` in rows < `rows`."""
        if model.has_room(rows, capacity):  # nearly always
            return
        entries = [r.target_entries if model is self.target else r.draft_entries for r in self._occupants()]
        kept = {row: count for row, count in enumerate(entries) if count}
        if model.make_room(max(rows, len(entries)), max([capacity, *entries]), kept):
            self._frames.clear()
            self._rounds.forget()

    # A round.

    def _round(self, began: float) -> None:
        flight, self._ahead = self._ahead or self._launch(), None
        if flight.replayed and self._steady():
            self._refresh_uniforms(flight.plan)
            assert self.frame is not None
            self._ahead = self._rounds.launch(self._view, flight.plan, self.frame, self.rows.tokens.shape[1])
        self._end(flight, began)
        if all(request.finished for request in self.live):
            self._ahead = None  # nobody waits for it
        if self._ahead is None:
            self._leave()

    def _steady(self) -> bool:
        """Whether the next round is of the same kind for the same rows, whatever comes out of the one in flight."""
        return (
            not (self.waiting and len(self.live) < self.max_batch)
            and self.prefilling is None
            and not any(request.finished or request.cancelled for request in self.live)
            and self._plan_key == tuple((*request.wanted, request.entropy_limit) for request in self.live)
            and not any(drafter == "suffix" for _, drafter, _ in self._plan_key)  # the host has to read first
            and any(request.remaining > 1 for request in self.live)
        )

    def _launch(self) -> Flight:
        """A round for the live rows as they are."""
        self._choose()
        if self.draft is not None:
            self._catch_up(self.draft)
        plan = self._current_plan()
        span = max(request.length for request in self.live)
        self._make_room(self.target, plan.batch, span + plan.draft_length + 1)
        if plan.runs_draft:
            assert self.draft is not None
            self._make_room(self.draft, plan.batch, span + plan.draft_length + 1)
        self._refresh_uniforms(plan)
        if plan.suffix:
            padded = [(request.suggested + [0] * plan.draft_length)[: plan.draft_length] for request in self.live]
            self._view.suggested[:, : plan.draft_length] = torch.tensor(padded)
        self.frame = self._frame_for(plan)
        return self._rounds.launch(self._view, plan, self.frame, span)

    def _choose(self) -> None:
        if self._controller is not None:
            self._controller.choose(self.live)

    def _end(self, flight: Flight, began: float) -> None:
        """Give what a round decided to its requests; one that had ended before it gets nothing."""
        decided = [
            (request, drafter, result)
            for request, (_, drafter, _), result in zip(self.live, self._plan_key, flight.results(), strict=True)
            if not request.finished
        ]
        for request, drafter, result in decided:
            self._commit(request, result, flight.plan, drafter)
        times = flight.clock.parts()
        host_ms = max(0.0, 1e3 * (perf_counter() - began) - sum(times))  # one that ran ahead took less of the host's
        for request, _, _ in decided:
            request.speculation.add_times(*times, host_ms)

    def _catch_up(self, draft: Model) -> None:
        """The draft's first step sees the last two tokens; it must have seen all before them.

        A row that turns to the draft late owes it much, and drafts nothing until it has paid, a chunk a step.
        """
        for row, request in enumerate(self.live):
            missing = request.length - 2 - request.draft_entries
            if missing > 0 and request.wanted[1] in WITH_MODEL:
                chunk = min(missing, PREFILL_WIDTH)
                self._feed(draft, row, request.draft_entries, chunk)
                request.draft_entries += chunk

    def _refresh_uniforms(self, plan: Plan) -> None:
        """Those of a round that begins at the known length, or as far beyond it as one in flight may reach."""
        if not plan.rejection:
            return
        for row, request in enumerate(self.live):
            for length in (request.length, request.length + plan.draft_length + 1):
                block = length // BLOCK
                if request.uniform_blocks[block % 2] != block:
                    self.rows.fill_uniforms(row, block)
                    request.uniform_blocks[block % 2] = block

    def _commit(self, request: Request, result: RowResult, plan: Plan, drafter: str) -> None:
        before = request.length
        kept = request.commit(result.tokens, result.accepted, result.logprobs)
        if drafter in WITH_MODEL:  # which never saw its own last proposal
            request.draft_entries = before + min(result.accepted, result.proposed - 1)
        request.target_entries = before + result.accepted
        outcome = Outcome(result.proposed, result.accepted, kept)
        for speculation in (self.speculation, request.speculation):
            speculation.add_round(*outcome)
        if drafter in request.estimates:
            request.estimates[drafter].observe(outcome.proposed, outcome.examined, outcome.stood)
        if request.level is not None:
            request.level.observe(result.entropies[: outcome.examined])
        if request.trace is not None and result.trace is not None:
            traced = result.trace if request.level is not None else replace(result.trace, entropies=())
            ended_early = kept <= result.accepted
            request.trace.append(replace(traced, accepted=kept, next_token=None) if ended_early else traced)

    def _current_plan(self) -> Plan:
        key = tuple((*self._source(request), request.entropy_limit) for request in self.live)
        if self._plan is None or key != self._plan_key:
            self._plan_key, self._plan = key, self._make_plan(key)
            self._view = self.rows.view(self._plan.batch)
        return self._plan

    def _source(self, request: Request) -> tuple[int, str]:
        """How many proposals a row takes this round, and from where; none from a draft that is behind."""
        length, drafter = request.wanted
        if drafter in WITH_MODEL and not 2 <= request.length <= request.draft_entries + 2:
            return 0, "none"
        if drafter == "suffix":
            request.suggested = self._suffixes.suggest(request, length)
            return len(request.suggested), "suffix" if request.suggested else "none"
        return length, drafter

    def _frame_for(self, plan: Plan) -> Frame:
        key = (plan.batch, plan.draft_length, plan.model, plan.sampled, plan.cascade)
        if key not in self._frames:
            self._frames[key] = Frame(plan, self.target, self.draft, self.ngrams)
        return self._frames[key]

    def _make_plan(self, key: tuple[Source, ...]) -> Plan:
        batch = len(self.live)
        lengths, limits = [length for length, _, _ in key], [limit for _, _, limit in key]
        self.rows.entropy_limit[:batch] = torch.tensor([inf if limit in (None, 1) else limit for limit in limits])
        stops = any(limit not in (None, 1) for limit in limits)
        for name in SOURCES:
            asked = torch.tensor([length if drafter == name else 0 for length, drafter, _ in key])
            getattr(self.rows, f"from_{name}")[:batch] = asked

        def any_row(holds: Callable[[SamplingParams], bool]) -> bool:
            return any(holds(request.params) for request in self.live)

        logprobs = [p for request in self.live if (p := request.params.logprobs) is not None]
        return Plan(
            batch=batch,
            draft_length=max(lengths),
            **{source: any(name == source for _, name, _ in key) for source in SOURCES},
            ragged=stops or any(name in ("lookup", "cascade") or length < max(lengths) for length, name, _ in key),
            tempered=any_row(lambda p: p.temperature not in (0, 1)),
            own_draft=any_row(lambda p: p.own_draft_temperature != p.temperature),
            rejection=any_row(lambda p: not p.greedy and p.rule == "rejection"),
            coupled=any_row(lambda p: p.greedy or p.rule == "coupled"),
            gumbel=any_row(lambda p: not p.greedy and p.rule == "coupled"),
            lenient=any_row(lambda p: p.lenient),
            top_k=any_row(lambda p: p.filtered and p.top_k > 0),
            top_p=any_row(lambda p: p.filtered and p.top_p < 1),
            min_p=any_row(lambda p: p.filtered and p.min_p > 0),
            penalised=any_row(lambda p: p.penalised),
            biased=any_row(lambda p: bool(p.logit_bias)),
            logprobs=min(max(logprobs), self.target.vocab_size) if logprobs else None,
            traced=any(request.trace is not None for request in self.live),
            entropies=any(length and limit is not None for length, _, limit in key),
        )
