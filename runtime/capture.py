"""Rounds on a GPU as one launch: what a round once launched piece by piece is recorded as a CUDA graph and replayed."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .frame import Frame
from .result import RowResult, read_table, tabulate
from .round import run_round
from .rows import Plan, Rows


class Rounds:
    """Runs rounds: the first of a kind as it is, the second too and then records it, the others from the record.

    All that a record reads and writes stays where it is: the rows, the frame, the cache and the logits.
    """

    def __init__(self, capturable: Callable[[], bool]) -> None:
        self._capturable = capturable  # asked when there is something to capture
        self._seen: dict[Plan, Callable[[], Tensor] | None] = {}

    def run(self, rows: Rows, plan: Plan, frame: Frame, span: int) -> list[RowResult]:
        """As `run_round`, which bounds `span`; read by the host."""
        if (replay := self._seen.get(plan)) is not None:
            return read_table(replay(), plan)
        table = tabulate(run_round(rows, plan, frame, span), plan)
        results = read_table(table, plan)
        if plan not in self._seen:
            self._seen[plan] = None
        elif self._captures:
            whole = rows.tokens.shape[1]  # a bound for every round to come
            self._seen[plan] = record(lambda: tabulate(run_round(rows, plan, frame, whole), plan), like=table)
        return results

    def forget(self) -> None:
        self._seen.clear()

    @cached_property
    def _captures(self) -> bool:
        return self._capturable()


_pool: list[Any] = []  # one memory for all records: no two of them run at once


def record(work: Callable[[], Tensor], like: Tensor) -> Callable[[], Tensor]:
    """A function that launches all of `work` at once, and returns its result on the host."""
    result = torch.empty_like(like, device="cpu", pin_memory=True)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.current_stream(like.device)
    if not _pool:
        _pool.append(torch.cuda.graph_pool_handle())
    with torch.cuda.graph(graph, pool=_pool[0], stream=stream, capture_error_mode="thread_local"):
        result.copy_(work(), non_blocking=True)

    def replay() -> Tensor:
        graph.replay()
        stream.synchronize()
        return result

    return replay
