"""Time work on a device, which may still be running when a call returns."""

from collections.abc import Callable
from time import perf_counter

import torch


def wait_for(device: str) -> None:
    """Wait until all that was launched on the device has ended."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def run_ms(run: Callable[[], object], device: str = "cpu") -> float:
    """Run it, and return the milliseconds until the device has finished."""
    wait_for(device)
    began = perf_counter()
    run()
    wait_for(device)
    return 1e3 * (perf_counter() - began)
