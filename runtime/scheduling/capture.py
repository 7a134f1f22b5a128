"""Launches rounds over frames that are made once; on a GPU a round that repeats is replayed as a CUDA graph."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...engines import Engine, EngineError
from ...engines.errors import first_line
from ..memory.model import Model
from ..round.result import RowResult, read_table, tabulate
from ..round.round import run_round
from ..state.clock import Clock
from ..state.frame import Frame
from ..state.plan import Plan
from ..state.rows import Rows

MOST_KINDS = 256  # kinds of rounds that are remembered, and of frames
ONE_AT_A_TIME = threading.Lock()  # torch allows one capture at a time in a process


class LaunchedRound(NamedTuple):
    """A launched round, for the rows as they were then; the next may be launched before a replayed one is read."""

    plan: Plan
    table: Callable[[], Tensor]  # waits until the round has ended
    clock: Clock
    replayed: bool
    unchecked: Tensor | torch.dtype | None  # what the host finds NaN in

    def results(self, rows: Sequence[int]) -> list[RowResult]:
        """Return the results of these rows; nothing is read of a row that has ended, so it cannot fail."""
        return read_table(self.table(), self.plan, self.unchecked, rows)


class Rounds:
    """Launches rounds. The first two of a kind run piece by piece; then it is recorded, and later rounds replay it.

    All that a record reads and writes stays in place: the rows, the frame, the cache and the logits. Only its result
    and its times are its own. So each kind has two records that take turns: one is read while the other runs.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines  # asked before each recording whether they can be captured; none: never
        self._seen: dict[Plan, deque[Record] | None] = {}
        self._pool: Any = None  # memory that all records share, because no two run at once
        self._clock: Clock | None = None  # of rounds that are not replayed

    @property
    def recorded(self) -> bool:
        """Whether rounds that repeat are recorded."""
        return bool(self._engines) and all(engine.capturable() for engine in self._engines)

    @property
    def kinds(self) -> int:
        """How many kinds of rounds are recorded now."""
        return sum(records is not None for records in self._seen.values())

    def launch(self, rows: Rows, plan: Plan, frame: Frame, span: int) -> LaunchedRound:
        """Launch a round that does what `run_round` does; see there for `span`."""
        if records := self._seen.get(plan):
            records.rotate()
            records[0].launch()
            return LaunchedRound(plan, records[0].table, records[0].clock, True, frame.unchecked)
        flight = self.run(rows, plan, frame, span)
        if plan not in self._seen:
            if len(self._seen) >= MOST_KINDS:
                self.forget()
            self._seen[plan] = None
        elif plan.recordable and self.recorded:
            whole = rows.tokens.shape[1]  # a span that fits every later round
            self._pool = self._pool or new_pool()
            work = partial(tabulated_round, rows, plan, frame, whole)
            self._seen[plan] = deque(Record(work, flight.table(), self._pool, self._engines) for _ in range(2))
        return flight

    def run(self, rows: Rows, plan: Plan, frame: Frame, span: int) -> LaunchedRound:
        """Run a round that is never replayed."""
        clock = self._clock = self._clock or Clock(rows.length.device)
        table = tabulated_round(rows, plan, frame, span, clock)
        return LaunchedRound(plan, lambda: table, clock, False, frame.unchecked)

    def forget(self) -> None:
        self._seen.clear()
        self._pool = None  # memory that is still held from it must not be written again


class Frames:
    """Makes a frame for each shape of a round, and keeps it as long as the caches that it is bound to stay in place.

    Rounds that were recorded over frames are forgotten with them.
    """

    def __init__(self, models: Sequence[Model], rounds: Rounds) -> None:
        self._models, self._rounds = models, rounds
        self._made: dict[object, Frame] = {}
        self._versions: list[int] = []  # of the caches that they were made for

    def of(self, plan: Plan, *, prefilled: bool = False) -> Frame:
        """Return the frame of a plan; `prefilled` if reading a prompt gives its logits."""
        versions = [model.cache.version for model in self._models]
        key = (plan.steps, plan.entries_read, prefilled)
        if versions != self._versions or (len(self._made) >= MOST_KINDS and key not in self._made):
            self.forget()
            self._versions = versions
        if key not in self._made:
            self._made[key] = Frame(plan, self._models[0], prefilled=prefilled)
        return self._made[key]

    def forget(self) -> None:
        self._made.clear()
        self._rounds.forget()


def tabulated_round(rows: Rows, plan: Plan, frame: Frame, span: int, clock: Clock) -> Tensor:
    return tabulate(run_round(rows, plan, frame, span, clock), plan)


def new_pool() -> Any:
    return torch.cuda.graph_pool_handle()


class Record:
    """One CUDA graph of all of `work`, and its result on the host."""

    def __init__(
        self, work: Callable[[Clock], Tensor], like: Tensor, pool: Any, engines: Sequence[Engine] = ()
    ) -> None:
        self._engines = [one for one in engines if one.contract.shards > 1]
        self.clock = Clock(like.device)
        self._result = torch.empty_like(like, device="cpu", pin_memory=True)
        self._graph = torch.cuda.CUDAGraph()
        self._stream = torch.cuda.current_stream(like.device)
        event: Any = torch.cuda.Event  # torch leaves it untyped
        self._ended = event()
        graph = torch.cuda.graph(self._graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
        try:
            with ONE_AT_A_TIME, ExitStack() as others, graph:
                for engine in self._engines:
                    others.enter_context(engine.recording(self))
                self._result.copy_(work(self.clock), non_blocking=True)
        except RuntimeError as error:
            raise EngineError(
                f"the round cannot be recorded as a CUDA graph ({first_line(error)}); "
                "open the decoder with capture=False"
            ) from error

    def launch(self) -> None:
        for engine in self._engines:
            engine.replay(self)
        self._graph.replay()
        self._ended.record(self._stream)

    def table(self) -> Tensor:
        self._ended.synchronize()
        return self._result
