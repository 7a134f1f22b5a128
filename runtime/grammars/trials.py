"""Tries grammars in a process of its own, which can be ended, before they are compiled here."""

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from ...engines import RequestError
from . import with_llguidance
from .grammar import NAMES

SECONDS = 0.9  # to compile a grammar; a healthy one takes milliseconds
START_SECONDS = 60.0  # for the process to read a tokenizer
WAIT_SECONDS = 10.0  # for the grammars of others, one of which is tried at a time


class Untried(RequestError):
    """No grammar could be tried just now."""


class Trials:
    """One process, started for the first grammar and again where it has ended, whoever has ended it."""

    def __init__(self, tokenizer: str, vocab_size: int, ends: Sequence[int]) -> None:
        self.ended = 0  # processes, each by a grammar that took too long or too much memory
        self._opening = [tokenizer, vocab_size, list(ends)]
        self._process: subprocess.Popen[str] | None = None
        self._end: Callable[[], object] = lambda: None  # ends the process, at the latest with this object
        self._lock = threading.Lock()

    def require(self, kind: str, text: str) -> None:
        """Refuse a grammar that does not compile, or not within bounds of time and memory."""
        if not self._lock.acquire(timeout=WAIT_SECONDS):
            raise Untried("too many grammars are waiting to be compiled; try again soon", "grammar")
        try:
            said = self._tried(kind, text) or self._tried(kind, text)  # none: it may have ended for another reason
            if said is None:
                self.ended += 1
                raise RequestError(
                    "the process that compiles the grammar has ended twice over it, by too much memory or a fault of "
                    "the library; simplify it",
                    "grammar",
                )
        finally:
            self._lock.release()
        if said.wrong:
            name = NAMES.get(kind, "grammar")
            raise RequestError(f"the {name} cannot be compiled ({said.wrong}); mend or simplify it", "grammar")

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._forget()

    def _tried(self, kind: str, text: str) -> "Said | None":
        """Let the process compile a grammar; None if the process has ended, before or because of it."""
        if self._process is None:
            self._process = self._started()
        try:
            said = _answer(self._process, [kind, text], SECONDS)
        except TimeoutError:
            self._forget()
            self.ended += 1
            raise RequestError(
                f"the grammar takes longer than {SECONDS:g} s to compile; simplify it", "grammar"
            ) from None
        if said is None:
            self._forget()
        return said

    def _forget(self) -> None:
        self._end()
        self._process = None

    def _started(self) -> "subprocess.Popen[str]":
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", with_llguidance.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            raise Untried(
                f"no process can be started to compile a grammar in ({error}); leave it out", "grammar"
            ) from error
        self._end = weakref.finalize(self, _kill, process)
        try:
            said = _answer(process, self._opening, START_SECONDS)
        except TimeoutError:
            said = None
        if said is None:
            self._end()
            raise Untried("the process that compiles grammars has not started; leave the grammar out", "grammar")
        return process


class Said(NamedTuple):
    """What the process says of a grammar: what is wrong with it, or nothing."""

    wrong: str


def _answer(process: "subprocess.Popen[str]", fields: Sequence[object], seconds: float) -> Said | None:
    """Send a line and return what comes back; None if the process has ended. It may take so many seconds."""
    assert process.stdin is not None
    assert process.stdout is not None
    began, answer = time.monotonic(), b""
    try:
        process.stdin.write(json.dumps(fields) + "\n")
        process.stdin.flush()
    except OSError:
        return None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not answer.endswith(b"\n"):
            if not selector.select(max(0.0, began + seconds - time.monotonic())):
                raise TimeoutError
            part = os.read(process.stdout.fileno(), 4096)
            if not part:  # it has ended
                return None
            answer += part
    return Said(json.loads(answer))


def _kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
