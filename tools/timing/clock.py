"""Time work on a device, which may still be running when a call returns."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter, process_time

import torch

CLOCK: ContextVar[Callable[[], float]] = ContextVar("CLOCK", default=perf_counter)


def now() -> float:
    """Return the seconds of the clock that measures."""
    return CLOCK.get()()


@contextmanager
def processor_time() -> Iterator[None]:
    """Count what this process has of a processor until the block ends: other work on the core does not show in it."""
    before = CLOCK.set(process_time)
    try:
        yield
    finally:
        CLOCK.reset(before)


def wait_for(device: str) -> None:
    """Wait until all that was launched on the device has ended."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def run_ms(run: Callable[[], object], device: str = "cpu") -> float:
    """Run it, and return the milliseconds until the device has finished."""
    wait_for(device)
    began = now()
    run()
    wait_for(device)
    return 1e3 * (now() - began)
