"""Rounds on a GPU as one launch: what a round once launched piece by piece is recorded as a CUDA graph and replayed."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...engines import Engine, EngineError
from ...engines.errors import first_line
from .clock import Clock
from .frame import Frame
from .plan import Plan
from .result import RowResult, read_table, tabulate
from .round import run_round
from .rows import Rows

MOST_KINDS = 256  # of rounds that are remembered
ONE_AT_A_TIME = threading.Lock()  # torch captures once in a process


class Flight(NamedTuple):
    """A round that was launched, for the rows as they stood then; a replayed one may be followed before it is read."""

    plan: Plan
    table: Callable[[], Tensor]  # waits for its end
    clock: Clock
    replayed: bool
    logits: Tensor | None  # on the CPU, where they are not yet checked

    def results(self) -> list[RowResult]:
        return read_table(self.table(), self.plan, self.logits)


class Rounds:
    """Launches rounds: the first of a kind as it is, the second too and then records it, the others from the record.

    All that a record reads and writes stays where it is: the rows, the frame, the cache and the logits. Only its result
    is its own, and so are its times: of each kind there are two that take turns, one read while the other runs.
    """

    def __init__(self, engines: Sequence[Engine]) -> None:
        self._engines = engines  # asked whether they can be captured when there is something to capture; none: never
        self._seen: dict[Plan, deque[Record] | None] = {}
        self._pool: Any = None  # one memory for all records: no two of them run at once
        self._clock: Clock | None = None  # of rounds as they are

    def launch(self, rows: Rows, plan: Plan, frame: Frame, span: int) -> Flight:
        """Start what `run_round` does, which bounds `span`."""
        if records := self._seen.get(plan):
            records.rotate()
            records[0].launch()
            return Flight(plan, records[0].table, records[0].clock, True, None)
        clock = self._clock = self._clock or Clock(rows.length.device)
        table = tabulated_round(rows, plan, frame, span, clock)
        if plan not in self._seen:
            if len(self._seen) >= MOST_KINDS:
                self.forget()
            self._seen[plan] = None
        elif self._engines and all(engine.capturable() for engine in self._engines):
            whole = rows.tokens.shape[1]  # a bound for every round to come
            self._pool = self._pool or new_pool()
            work = partial(tabulated_round, rows, plan, frame, whole)
            self._seen[plan] = deque(Record(work, table, self._pool) for _ in range(2))
        return Flight(plan, lambda: table, clock, False, frame.target_logits if frame.on_cpu else None)

    def forget(self) -> None:
        self._seen.clear()
        self._pool = None  # what is still held of its memory may not be written again


def tabulated_round(rows: Rows, plan: Plan, frame: Frame, span: int, clock: Clock) -> Tensor:
    return tabulate(run_round(rows, plan, frame, span, clock), plan)


def new_pool() -> Any:
    return torch.cuda.graph_pool_handle()


class Record:
    """All of `work` as one launch, and its result on the host."""

    def __init__(self, work: Callable[[Clock], Tensor], like: Tensor, pool: Any) -> None:
        self.clock = Clock(like.device)
        self._result = torch.empty_like(like, device="cpu", pin_memory=True)
        self._graph = torch.cuda.CUDAGraph()
        self._stream = torch.cuda.current_stream(like.device)
        event: Any = torch.cuda.Event  # torch leaves it untyped
        self._ended = event()
        graph = torch.cuda.graph(self._graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
        try:
            with ONE_AT_A_TIME, graph:
                self._result.copy_(work(self.clock), non_blocking=True)
        except RuntimeError as error:
            raise EngineError(
                f"the round cannot be recorded as a CUDA graph ({first_line(error)}); "
                "open the decoder with capture=False"
            ) from error

    def launch(self) -> None:
        self._graph.replay()
        self._ended.record(self._stream)

    def table(self) -> Tensor:
        self._ended.synchronize()
        return self._result
