"""Repeats that an interruption may end: what whole ones have measured is kept."""

from collections.abc import Callable
from copy import deepcopy
from typing import TypeVar

from ..console import say

T = TypeVar("T")


def whole_repeats(repeats: int, run: Callable[[int], None], measured: T) -> tuple[T, int]:
    """Run so many repeats, which add to `measured`; returns what whole ones have added, and how many they were.

    An interruption before the first has ended goes on.
    """
    kept, done = measured, 0
    try:
        for repeat in range(repeats):
            run(repeat)
            kept, done = deepcopy(measured), repeat + 1
    except KeyboardInterrupt:
        if not done:
            raise
        say(f"interrupted: this is what {done} of {repeats} repeats have measured")
    return kept, done
