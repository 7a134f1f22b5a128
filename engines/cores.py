"""The number of cores that are ours to use, which may be fewer than the machine has."""

import os


def usable_cores(process: int = 0) -> int:
    """Return how many cores the calling thread may use; for a process id, how many that process's first thread may."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(process))
    return os.cpu_count() or 1
