"""Times the parts of a round by the host's clock, or by the GPU's, for which the host does not wait."""

from time import perf_counter
from typing import Any

import torch

PARTS = 5  # begun, noise drawn, drafted, verified, ended


class Clock:
    """Notes when each part ends; events recorded in a CUDA graph have the times of its latest replay."""

    def __init__(self, device: torch.device) -> None:
        self._times = [0.0] * PARTS  # milliseconds
        self._events: list[Any] = []
        if device.type == "cuda":
            event: Any = torch.cuda.Event
            self._events = [event(enable_timing=True, external=True) for _ in range(PARTS)]

    def mark(self, part: int) -> None:
        if self._events:
            self._events[part].record()
        else:
            self._times[part] = 1e3 * perf_counter()

    def parts(self) -> tuple[float, float, float]:
        """Return milliseconds of draft, verify and acceptance, which includes the noise; the round must have ended."""
        times = self._times
        if self._events:
            times = [self._events[0].elapsed_time(event) for event in self._events]
        begun, drawn, drafted, verified, ended = times
        return drafted - drawn, verified - drafted, drawn - begun + ended - verified
