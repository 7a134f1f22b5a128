"""Ends a program by SIGINT and SIGTERM, also where a library swallows what they raise.

What is raised inside a callback (of a weak reference, in C++) is printed by Python and forgotten. So the signal is
remembered: what it raises comes again shortly after such a callback, at the next step, and at the end.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

AGAIN_AFTER = 0.05  # seconds, in which the callback ends


class Terminated(BaseException):
    """SIGTERM as an exception, so that what is half-written is removed on its way out."""


ENDINGS: dict[int, type[BaseException]] = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
_came: list[int] = []


@contextmanager
def heeded() -> Iterator[list[int]]:
    """Raise the ending of each signal that comes during the block; gives the list of those that came."""
    global _came  # what came belongs to the block: behind it nothing insists on that
    before = {number: signal.getsignal(number) for number in (*ENDINGS, signal.SIGALRM)}
    hook = sys.unraisablehook

    def lost(told: "sys.UnraisableHookArgs") -> None:
        if _came and issubclass(told.exc_type, tuple(ENDINGS.values())):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_AFTER)
        else:
            hook(told)

    _came.clear()
    sys.unraisablehook = lost
    signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(_came[0]))  # to whoever handles it by then
    for number in ENDINGS:
        if before[number] is not signal.SIG_IGN:  # which a shell sets for what it starts in the background
            signal.signal(number, _end)
    try:
        yield _came
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook
        _came = []


def insist() -> None:
    """Raise the ending of a signal that has come, if one has."""
    if _came:
        raise ENDINGS[_came[0]]


def _end(number: int, _: object) -> NoReturn:
    _came.append(number)
    raise ENDINGS[number]
