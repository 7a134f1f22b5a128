"""How fast this machine reads memory: the roof of every step that reads each weight once."""

import os
from time import perf_counter

import torch

BLOCK_BYTES = 256 << 20  # more than caches hold
TRIES = 7


def read_bandwidth() -> float:
    """Bytes per second that all cores together read, at best."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        block = torch.ones(BLOCK_BYTES // 4)
        return BLOCK_BYTES / min(_seconds_of_a_read(block) for _ in range(TRIES))
    finally:
        torch.set_num_threads(before)


def _seconds_of_a_read(block: torch.Tensor) -> float:
    began = perf_counter()
    block.sum()
    return perf_counter() - began
