"""A test waits for another thread, though not for ever."""

import time
from collections.abc import Callable


def until(holds: Callable[[], bool]) -> None:
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)
