"""Time the engines' own steps as a decoder runs them: replayed as CUDA graphs wherever its rounds are.

A step that is launched piece by piece on a GPU mostly waits for the host, and costs several times what it costs in a
round that was recorded. Nothing may be compared with such a round but a step that was recorded as well.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor

from ...engines import Step
from ...runtime.scheduling import capture
from .clock import run_ms

LONG_MS = 3.0  # a shorter step is replayed until this is over, so that launching and waiting add little to each
MOST_REPLAYS = 16


class BareSteps:
    """Times steps that have run before: any may run again, and leaves what it has written as it is."""

    def __init__(self, device: str, recorded: bool) -> None:
        self._device, self._recorded = device, recorded
        self._records: dict[int, tuple[Step, Any, int]] = {}  # by id, which is unique while the step lives
        self._pool: Any = None

    def ms(self, step: Step) -> float:
        """Return the milliseconds that a run takes."""
        if not self._recorded:
            return run_ms(step.run, self._device)
        if id(step) not in self._records:
            self._records[id(step)] = step, *self._record(step)
        _, record, replays = self._records[id(step)]
        return _replayed_ms(record, replays, self._device)

    def _record(self, step: Step) -> tuple[Any, int]:
        """Return the record of a step, and how often to replay it."""
        self._pool = self._pool or capture.new_pool()
        mark = torch.zeros(1, device=self._device)  # a record brings some tensor to the host, and this is the smallest
        record = capture.Record(partial(_run_and_mark, step, mark), mark, self._pool)
        _replayed_ms(record, 1, self._device)  # the first replay also brings the graph to the device
        once = _replayed_ms(record, 1, self._device)
        return record, min(MOST_REPLAYS, ceil(LONG_MS / once)) if once else MOST_REPLAYS


def stream_of_records(device: str) -> AbstractContextManager[None]:
    """Enter a stream on which steps can be recorded; a decoder has one of its own."""
    if not device.startswith("cuda"):
        return nullcontext()
    stream: Any = torch.cuda.Stream
    return torch.cuda.stream(stream(device))


def _run_and_mark(step: Step, mark: Tensor, clock: object) -> Tensor:
    step.run()
    return mark


def _replayed_ms(record: Any, replays: int, device: str) -> float:
    def replay() -> None:
        for _ in range(replays):
            record.launch()
        record.table()  # waits until all have ended

    return run_ms(replay, device) / replays
