"""Writes answers that consist of parts, as the APIs of responses and messages have them: reasoning, text, and calls."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...runtime import Output, Piece, Request, TokenLogprob
from .answers import Delta, Usage
from .tool_calls import Reader


@dataclass
class Part:
    """One part of an answer; the text of a call is its arguments."""

    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the pieces in which its text came


class PartWriter(ABC):
    """Writes one answer, part by part: each ends where the next begins."""

    def __init__(self, reader: Reader) -> None:
        self.parts: list[Part] = []
        self._reader = reader
        self._unplaced: list[TokenLogprob] = []  # of tokens whose text has not come yet

    @abstractmethod
    def answer(self, output: Output, usage: Usage) -> object:
        """Return the whole answer, of all the parts."""

    @abstractmethod
    def start(self, request: Request) -> Iterator[bytes]:
        """Yield the events before the first part."""

    @abstractmethod
    def begun(self, part: Part) -> Iterator[bytes]:
        """Yield the events of a part that begins: the last one."""

    @abstractmethod
    def added(self, part: Part, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[bytes]:
        """Yield the events of new text in the last part."""

    @abstractmethod
    def ended(self, part: Part) -> Iterator[bytes]:
        """Yield the events of the last part's end."""

    @abstractmethod
    def finish(self, output: Output, usage: Usage) -> Iterator[bytes]:
        """Yield the events after the last part."""

    # What delivery asks for.

    def whole(self, outputs: Sequence[Output], usage: Usage) -> object:
        [output] = outputs
        deltas = [*self._reader.feed(output.text), *self._reader.end(output.finish_reason == "stop")]
        for _ in self._take(deltas, output.logprobs or ()):
            pass
        return self.answer(output, usage)

    def opening(self, requests: Sequence[Request]) -> bytes:
        return b"".join(self.start(requests[0]))

    def chunk(self, index: int, pieces: Sequence[Piece], request: Request) -> bytes:
        text = "".join(piece.text for piece in pieces)
        return b"".join(self._take(self._reader.feed(text), [one for piece in pieces for one in piece.logprobs]))

    def closing(self, index: int, output: Output, request: Request) -> bytes:
        return b"".join(self._take(self._reader.end(output.finish_reason == "stop"), ())) + self._close()

    def end(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        return b"".join(self.finish(outputs[0], usage))

    def _take(self, deltas: Iterable[Delta], logprobs: Sequence[TokenLogprob]) -> Iterator[bytes]:
        self._unplaced += logprobs
        for delta in deltas:
            if delta.content:
                own, self._unplaced = self._unplaced, []
                yield from self._add(Part("text"), delta.content, own)
            else:
                self._unplaced.clear()
            if delta.reasoning_content:
                yield from self._add(Part("reasoning"), delta.reasoning_content)
            for call in delta.tool_calls or ():
                name = call.function.name or ""
                yield from self._add(Part("call", call_id=call.id or "", name=name), call.function.arguments)

    def _add(self, part: Part, text: str, logprobs: Sequence[TokenLogprob] = ()) -> Iterator[bytes]:
        """Add text to the last part if that is of this kind, or begin this one."""
        last = self.parts[-1] if self.parts else None
        if last is None or last.kind != part.kind or part.call_id:
            yield self._close()
            self.parts.append(part)
            yield from self.begun(part)
            last = part
        last.text += text
        last.logprobs += logprobs
        if text:
            yield from self.added(last, text, logprobs)

    def _close(self) -> bytes:
        if not self.parts:
            return b""
        if self.parts[-1].kind == "text":
            self.parts[-1].logprobs += self._unplaced
        return b"".join(self.ended(self.parts[-1]))
