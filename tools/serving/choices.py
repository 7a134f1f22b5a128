"""Writes answers that consist of choices, as OpenAI's completions and chats do."""

import secrets
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Generic, TypeVar

from msgspec import UNSET, UnsetType

from ...runtime import Output, Piece, Request
from .answers import AChoice, Answer, AnyChoice, FinishReason, Head, PromptDetails, Usage
from .bodies import Generation, StreamOptions
from .delivery import DONE, event
from .errors import ApiError
from .service import Service

Whole = TypeVar("Whole", bound=AnyChoice)
Chunk = TypeVar("Chunk", bound=AnyChoice)


class ChoiceWriter(ABC, Generic[Whole, Chunk]):
    """Writes one kind of answer, choice by choice."""

    def __init__(self, service: Service, body: Generation, name: str, kind: str, chunk_kind: str) -> None:
        name = f"{name}-{secrets.token_hex(12)}"
        model = body.model or service.name
        self.head = Head(name, kind, model, service.fingerprint)
        self.chunk_head = Head(name, chunk_kind, model, service.fingerprint)
        self._spelling, self._body = service.spelling, body
        self._options = body.stream_options or StreamOptions()
        self._written: Counter[int] = Counter()  # tokens of each choice

    @abstractmethod
    def choice(self, index: int, output: Output) -> Whole:
        """Return a whole choice."""

    @abstractmethod
    def first(self, index: int, request: Request) -> Chunk | None:
        """Return the chunk before the first piece."""

    @abstractmethod
    def next(self, index: int, pieces: Sequence[Piece], request: Request) -> Chunk | None:
        """Return a chunk of new pieces; None if there is nothing to show."""

    @abstractmethod
    def last(self, index: int, output: Output) -> Chunk:
        """Return the chunk that says why a choice ended."""

    # What delivery asks for.

    def whole(self, outputs: Sequence[Output], usage: Usage) -> Answer[Whole]:
        choices = [self._extended(self.choice(index, output), output) for index, output in enumerate(outputs)]
        return self.head.answer(choices, usage)

    def opening(self, requests: Sequence[Request]) -> bytes:
        return b"".join(
            self._event(self.first(index, request), index, request) for index, request in enumerate(requests)
        )

    def chunk(self, index: int, pieces: Sequence[Piece], request: Request) -> bytes:
        self._written[index] += sum(len(piece.token_ids) for piece in pieces)
        return self._event(self.next(index, pieces, request), index, request)

    def closing(self, index: int, output: Output, request: Request) -> bytes:
        return self._event(self._extended(self.last(index, output), output), index, request)

    def end(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        return (event(self.chunk_head.answer([], usage)) if self._options.include_usage else b"") + DONE

    def failure(self, error: ApiError) -> bytes:
        return event(error.answer)

    def _event(self, choice: Chunk | None, index: int, request: Request) -> bytes:
        if choice is None:
            return b""
        answer = self.chunk_head.answer([choice], self._usage(index, request))
        if self._options.include_obfuscation:
            answer.obfuscation = secrets.token_urlsafe(secrets.randbelow(16))
        return event(answer)

    def _usage(self, index: int, request: Request) -> Usage | UnsetType | None:
        if self._options.continuous_usage_stats:
            read, written = len(request.prompt), self._written[index]
            return Usage(read, written, read + written, PromptDetails(request.cached_tokens))
        return None if self._options.include_usage else UNSET

    def _extended(self, choice: AChoice, output: Output) -> AChoice:
        """Add what goes beyond OpenAI's API: what stopped the text, and the counts of rounds if they are asked for."""
        if isinstance(output.stopped_by, str) or output.stopped_by in (self._body.stop_token_ids or ()):
            choice.stop_reason = output.stopped_by
        if self._body.speculation:
            choice.speculation = output.speculation.to_json() | {"lossless": output.lossless}
        return choice


def reason_of(output: Output) -> FinishReason:
    return "stop" if output.finish_reason == "stop" else "length"
