"""The core: it reads the prompts of new requests and runs one round after another for all live ones."""

from collections.abc import Mapping
from time import perf_counter

from ...engines import RequestError
from ..acceptance.seat import make_rows
from ..drafters import Drafter
from ..drafters.windows import Windows
from ..lengths.controller import Unread
from ..lengths.drafting import DraftingRules
from ..memory.adapter_pool import Loaded
from ..memory.full import CacheFull
from ..requests.metrics import Speculation
from ..state.frame import Frame
from ..state.plan import LEAST_WINDOW
from .capture import Frames, LaunchedRound, Rounds
from .models import Models
from .occupants import Occupant, refresh_uniforms
from .planning import Planner
from .prefill import Prefill
from .reading import Reading
from .results import Results
from .seating import Seating


class Scheduler:
    """Schedules a round, runs it, and gives its results to the requests; one thread at a time may call `step`."""

    def __init__(
        self,
        models: Models,
        drafters: Mapping[str, Drafter],
        rules: DraftingRules,
        max_batch: int,
        capacity: int,
        capture: bool,
    ) -> None:
        self.target, self.drafts = target, drafts = models.target, models.drafts
        self.frame: Frame | None = None  # of the last round
        self.replayed = False  # whether the last round that was read had been recorded
        self._drafters, self._rules = drafters, rules
        self._models, self._encoders, self._eyes = models.all, models.encoders, models.eyes
        device, copied = target.engine.device, max((one.longest_text for one in models.encoders), default=0)
        self._rows = make_rows(max_batch, capacity, target.vocab_size, len(drafters), device, copied)
        for drafter in drafters.values():
            self._rows.columns.update(drafter.columns(max_batch))
        recurrent = [model for model in self._models if model.recurrent]
        most = target.engine.verify_width - 1 if rules.most is None else rules.most
        pays = any(not model.engine.reads_live for model in self._models)  # for entries that no row has yet
        bucket = target.bucket if pays else None
        self._planner = Planner(self._rows, drafters, target.vocab_size, most, bucket, recurrent, models.adapters)
        self.seating = Seating(
            self._rows, self._models, drafters.values(), rules, models.kept_blocks, self._planner.forget
        )
        self._windows = Windows(drafters, drafts)
        self._rounds = Rounds([model.engine for model in self._models] if capture else [])
        self._frames = Frames(self._models, self._rounds)
        self._results = Results(target, self._planner, rules)
        prefill = Prefill(self._rows, drafts)
        self._reading = Reading(
            self._rows,
            target,
            self.seating,
            prefill,
            self._windows,
            self._frames,
            self._rounds,
            self._results,
            models.encoders,
            models.eyes,
        )
        self._next: LaunchedRound | None = None  # a round launched before the previous one was read

    @property
    def speculation(self) -> Speculation:
        return self._results.speculation

    @property
    def by_drafter(self) -> dict[str, Speculation]:
        return dict(self._results.by_drafter)

    def by_adapter(self, loaded: Mapping[str, Loaded]) -> dict[str, Speculation]:
        return {name: self._results.by_adapter[one] for name, one in loaded.items() if one in self._results.by_adapter}

    @property
    def recorded(self) -> bool:
        return self._rounds.recorded

    @property
    def recorded_kinds(self) -> int:
        return self._rounds.kinds

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
                self.replayed = flight.replayed
                if flight.replayed:
                    self._launch_next(flight)
                self._results.give_all(flight, self.live, began)
                if self._next is not None and all(occupant.request.finished for occupant in self.live):
                    self._next = None  # no request needs its result
                if self._next is None:
                    self.seating.leave()
        except BaseException as error:
            self.abort(error)  # no row may be left half advanced
            raise
        return not self.seating.is_empty

    def forget_outputs(self) -> None:
        self.seating.prefixes.forget()
        for encoder in self._encoders:
            encoder.forget()
        if self._eyes is not None:
            self._eyes.forget()
        for drafter in self._drafters.values():
            drafter.forget()
        if self._rules.controller is not None:
            self._rules.controller.forget()

    def close(self) -> None:
        """End every request and free all memory."""
        if self._next is not None:
            self._next.table()  # wait, because it still writes to that memory
        closed = RequestError("the decoder was closed before the request had ended; open another and submit it again")
        self.abort(closed)
        self.seating.end_waiting(closed)
        self._frames.forget()
        self.frame = None
        for model in self._models:
            model.close()
        for encoder in self._encoders:
            encoder.close()
        if self._eyes is not None:
            self._eyes.close()

    def abort(self, error: BaseException) -> None:
        """End every request that has a row with this error; later requests start on clean rows."""
        self._next = None
        self.seating.end_all(error)

    # Schedule.

    def _schedule(self, began: float) -> LaunchedRound | None:
        """Return the round of this step: the one in flight if rows and kind stay the same, else a new one."""
        if self._next is not None:
            self._choose()
            if self._steady():
                flight, self._next = self._next, None
                return flight
            flight, self._next = self._next, None
            self._results.give_all(flight, self.live, began)
        self.seating.leave()  # nothing is in flight: rows may move, join and leave
        self._reading.read_prompts()
        self._search()
        return self._launch()

    def _search(self) -> None:
        """Run a round of each request with beams, and give its texts to one that has ended."""
        for occupant in list(self.seating.searching):
            if occupant.ended or occupant not in self.seating.searching:
                continue  # it was cancelled, or has given up its place
            try:
                self._results.search(occupant)
            except CacheFull as error:
                self.seating.preempt(error)
        self.seating.leave()

    def _choose(self) -> None:
        """Let each request choose what it drafts in the next round."""
        for occupant in self.live:
            if occupant.drafting is not occupant.request.drafting:
                occupant.drafting = occupant.request.drafting
                occupant.chooser = self._rules.chooser(occupant.drafting, occupant.request.adapter)
        if self._rules.controller is not None:
            self._rules.controller.choose([occupant.chooser for occupant in self.live], self._unread)

    def _unread(self, row: int) -> Unread:
        """Say how much of a row its draft has not read; that is the draft that it may use, or else the first."""
        occupant = self.live[row]
        draft = self._windows.draft_of(occupant.chooser.drafters)
        entries = 0 if draft is None else draft.cache.entries[row]
        return Unread(occupant.request.begin(LEAST_WINDOW) - entries, occupant.request.remaining)

    def _steady(self) -> bool:
        """Whether the next round has the same kind and rows, whatever the round in flight decides."""
        requests = [one.request for one in self.live]
        return (
            not self.seating.may_change
            and self._planner.repeats(requests, [one.chooser.wanted for one in self.live])
            and any(one.request.remaining > 1 for one in self.live)
        )

    # Run.

    def _launch(self) -> LaunchedRound | None:
        """Launch a round for the live rows, as many as there is memory for."""
        while self.live:
            try:
                return self._launch_for_all()
            except CacheFull as error:
                self.seating.preempt(error)
        return None

    def _launch_for_all(self) -> LaunchedRound:
        """Launch a round for the live rows as they are now."""
        self._choose()
        live = self.live
        requests = [occupant.request for occupant in live]
        wanted = [occupant.chooser.wanted for occupant in live]
        window = LEAST_WINDOW
        if any(one.length for one in wanted):
            window = self._windows.widest(wanted)
            self._reading.catch_up(live, window)
        plan = self._planner.plan(requests, wanted, window)
        lengths = [request.length for request in requests]
        span = max(lengths)
        assert self._planner.shares is not None
        # What a row has beyond its first line lies after the longest line of all.
        lines = [plan.draft_length if plan.beyond else share.length for share in self._planner.shares]
        widths = [length + plan.beyond + 1 + plan.look_aheads for length in lines]
        self.target.cache.make_slots(max(widths))
        self.target.cache.make_room(0, lengths, widths)
        for draft in plan.drafts:
            beyond = plan.beyond if plan.levels else 0
            width = draft.reads_for(plan.draft_length) + beyond + 1
            draft.cache.make_slots(width)
            draft.cache.make_room(0, lengths, [width] * plan.batch)
        refresh_uniforms(self._rows, plan, live)
        for drafter in sorted(plan.drafters, key=lambda one: one.samples):  # last those that run a draft in the round
            drafter.load(requests, plan.draft_length)
        self.frame = self._frames.of(plan)
        return self._rounds.launch(self._planner.view, plan, self.frame, span)

    def _launch_next(self, flight: LaunchedRound) -> None:
        """While a replay runs, launch the next round before reading it."""
        if self._steady():
            refresh_uniforms(self._rows, flight.plan, self.live)
            assert self.frame is not None
            span = self._rows.tokens.shape[1]
            self._next = self._rounds.launch(self._planner.view, flight.plan, self.frame, span)
