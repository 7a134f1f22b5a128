"""Run a peer in a process of its own, as whoever uses it does: in one process each side slows the other down."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from types import TracebackType
from typing import Any, Protocol, Self

from ...engines import EngineError
from ...runtime import SamplingParams
from .theirs import Theirs


class Opened(Protocol):
    """A peer with its models open."""

    def measure(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], into: Theirs) -> None:
        """Decode all prompts once."""

    def runs_as(self) -> dict[str, Any]:
        """The settings of its own that a rate depends on."""


class Apart:
    """A peer that was opened in another process, which waits while it is not asked."""

    def __init__(self, name: str, open: Callable[..., Opened], *arguments: object) -> None:
        self._name = name
        self._process = ProcessPoolExecutor(1, get_context("spawn"))
        try:
            self._result(self._process.submit(_open, open, *arguments))
        except BaseException:
            self.close()
            raise

    def measure(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], into: Theirs) -> None:
        measured = self._result(self._process.submit(_measure, prompts, params, into))
        vars(into).update(vars(measured))

    def runs_as(self) -> dict[str, Any]:
        found: dict[str, Any] = self._result(self._process.submit(_runs_as))
        return found

    def close(self) -> None:
        self._process.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _result(self, asked: "Future[Any]") -> Any:
        try:
            return asked.result()
        except BrokenProcessPool as error:
            raise EngineError(
                f"the process of {self._name} ended before it had answered, perhaps for want of memory; "
                "measure fewer prompts together, or leave out --compare"
            ) from error


# In the other process.

_opened: Opened | None = None


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
