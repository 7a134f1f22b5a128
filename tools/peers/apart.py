"""Run a peer in a process of its own, as its users do: in one process each side slows the other down."""

import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Protocol, Self

from ...engines import EngineError
from ...engines.errors import TrtSpecError
from ...runtime import SamplingParams
from ..timing.theirs import Theirs


class Opened(Protocol):
    """A peer with its models open."""

    def measure(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], into: Theirs) -> None:
        """Decode all prompts once."""

    def runs_as(self) -> dict[str, Any]:
        """The settings of its own that a rate depends on."""


class Apart:
    """A peer that is open in another process, which waits until it is asked and ends with this one."""

    def __init__(self, name: str, open: Callable[..., Opened], *arguments: object) -> None:
        self._name = name
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: an interruption of this process ends both
        try:
            self._process.start()
        finally:
            signal.signal(signal.SIGINT, before)
        theirs.close()
        try:
            self._ask(_open, open, *arguments)
        except BaseException:
            self.close()
            raise

    def measure(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], into: Theirs) -> None:
        vars(into).update(vars(self._ask(_measure, prompts, params, into)))

    def runs_as(self) -> dict[str, Any]:
        found: dict[str, Any] = self._ask(_runs_as)
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, work: Callable[..., Any], *arguments: object) -> Any:
        try:
            self._pipe.send((work, arguments))
            found, error = self._pipe.recv()
        except (EOFError, OSError) as lost:
            raise EngineError(
                f"the process of {self._name} ended before it answered, perhaps for lack of memory; lower --batch if "
                "it is above 1, or leave out --compare"
            ) from lost
        if error is not None:
            raise error
        return found


# In the other process.

_opened: Opened | None = None


def _serve(pipe: Connection) -> None:
    """Do what is asked for, and answer with what it gives or with an error that a user can mend."""
    with suppress(EOFError):  # whoever asked has ended
        while True:
            work, arguments = pipe.recv()
            try:
                pipe.send((work(*arguments), None))
            except TrtSpecError as error:
                pipe.send((None, error))


def _open(open: Callable[..., Opened], *arguments: object) -> None:
    global _opened
    _opened = open(*arguments)


def _measure(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], into: Theirs) -> Theirs:
    assert _opened is not None
    _opened.measure(prompts, params, into)
    return into


def _runs_as() -> dict[str, Any]:
    assert _opened is not None
    return _opened.runs_as()
