"""Ends a program by SIGINT and SIGTERM, and a block after so many seconds, also where a library suppresses that.

What is raised inside a callback (of a weak reference, in C++) is printed by Python and forgotten. So the signal is
remembered: what it raises comes again shortly after such a callback, at the next step, and at the end. The timer of
the process, which both need, belongs to this file: a signal that has come goes before the end of a time.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

AGAIN_AFTER = 0.05  # seconds, in which the callback ends
AGAIN_SECONDS = 5.0  # after which what has suppressed an ending all the same is interrupted again


class Terminated(BaseException):
    """SIGTERM as an exception, so that what is half-written is removed on its way out."""


class TimeUp(BaseException):
    """The seconds are over. It is no Exception, so that nothing takes it for an error that it can go on from."""


ENDINGS: dict[int, type[BaseException]] = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: Terminated}
_came: list[int] = []


@contextmanager
def heeded() -> Iterator[list[int]]:
    """Raise the ending of each signal that comes during the block; gives the list of those that came."""
    global _came  # what came belongs to the block: after it nothing insists on that
    before = {number: signal.getsignal(number) for number in (*ENDINGS, signal.SIGALRM)}
    hook = sys.unraisablehook

    def lost(raised: "sys.UnraisableHookArgs") -> None:
        if _came and issubclass(raised.exc_type, tuple(ENDINGS.values())):
            signal.setitimer(signal.ITIMER_REAL, AGAIN_AFTER, AGAIN_SECONDS)
        else:
            hook(raised)

    _came.clear()
    sys.unraisablehook = lost
    signal.signal(signal.SIGALRM, lambda *_: _raise_again())
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


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End what runs here, in the main thread, after so many seconds; a call into a library is first waited for."""

    def end(*_: object) -> None:
        if not _raise_again():
            raise TimeUp

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _raise_again() -> bool:
    """Raise a signal that has come once more, to whoever handles it by now; returns whether one has."""
    if _came:
        signal.raise_signal(_came[0])
    return bool(_came)


def insist() -> None:
    """Raise the ending of a signal that has come, if one has."""
    if _came:
        raise ENDINGS[_came[0]]


def _end(number: int, _: object) -> NoReturn:
    _came.append(number)
    raise ENDINGS[number]
