"""Measure how fast this machine reads memory, which bounds every step that reads each weight once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...engines import usable_cores
from .clock import run_ms

BLOCK_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}  # larger than any cache, and slow beside a launch
TRIES = 7


def read_bandwidth(device: str = "cpu") -> float:
    """The most bytes per second that the whole device reads."""
    with all_cores():
        size = BLOCK_BYTES[torch.device(device).type]
        block = torch.ones(size // 4, device=device)
        return 1e3 * size / min(run_ms(block.sum, device) for _ in range(TRIES))


@contextmanager
def all_cores() -> Iterator[None]:
    """Let torch use every core that this process may use."""
    before = torch.get_num_threads()
    torch.set_num_threads(usable_cores())
    try:
        yield
    finally:
        torch.set_num_threads(before)
