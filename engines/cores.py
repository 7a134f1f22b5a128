"""Counts the cores that we may use, which may be fewer than the machine has."""

import os


def usable_cores(process: int = 0) -> int:
    """Return how many cores the calling thread may use, or the first thread of the process with this id."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(process))
    return os.cpu_count() or 1
