"""Delivers what requests say, whole or as a stream of events, until the client has it or goes away."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ...runtime import Output, Piece, Request
from .access_log import note
from .answers import AChoice, AnyChoice, CompletionDetails, FinishReason, Head, PromptDetails, Usage
from .bodies import Generation
from .errors import ApiError, api_error
from .service import Service
from .stepper import Flight

log = logging.getLogger(__name__)
encode = msgspec.json.encode

CLIENT_GONE = 499  # nobody reads it but the log
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

Whole = TypeVar("Whole", bound=AnyChoice, covariant=True)
Chunk = TypeVar("Chunk", bound=AnyChoice, covariant=True)


class Writer(Protocol[Whole, Chunk]):
    """Writes one kind of answer, choice by choice."""

    head: Head
    chunk_head: Head

    def whole(self, index: int, output: Output) -> Whole:
        """Return the whole answer."""
        ...

    def opening(self, index: int, request: Request) -> Chunk | None:
        """Return the chunk before the first piece."""
        ...

    def chunk(self, index: int, pieces: Sequence[Piece], request: Request) -> Chunk | None:
        """Return a chunk of new pieces; None if there is nothing to show."""
        ...

    def last(self, index: int, output: Output) -> Chunk:
        """Return the chunk that says why it ended."""
        ...


def json_response(answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(answer), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.answer, error.status, error.headers)


def total_usage(flight: Flight, outputs: Sequence[Output], each: int) -> Usage:
    """Count what was read and written; of every `each` outputs the prompt is the same and counts once."""
    read = sum(output.usage.prompt_tokens for output in outputs[::each])
    written = sum(output.usage.completion_tokens for output in outputs)
    cached = sum(output.usage.cached_tokens for output in outputs[::each])
    usage = Usage(read, written, read + written, PromptDetails(cached))
    if any(request.prediction for request in flight.requests):
        stood = sum(output.speculation.accepted for output in outputs)
        proposed = sum(output.speculation.proposed for output in outputs)
        usage.completion_tokens_details = CompletionDetails(stood, proposed - stood)
    return usage


def reason_of(output: Output) -> FinishReason:
    return "stop" if output.finish_reason == "stop" else "length"


def extended(choice: AChoice, body: Generation, output: Output) -> AChoice:
    """Add the counts of rounds, if the body asks for them."""
    if body.speculation:
        choice.speculation = output.speculation.to_json() | {"lossless": output.lossless}
    return choice


async def until_gone(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class WholeAnswer(Response, Generic[Whole, Chunk]):
    """An answer in one piece; a client that goes away frees its rows."""

    def __init__(self, service: Service, flight: Flight, writer: Writer[Whole, Chunk], each: int) -> None:
        self.background: BackgroundTask | None = None
        self._service, self._flight, self._writer, self._each = service, flight, writer, each

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if await first_of(self._flight.ended(), until_gone(receive)):
                response = self._answer(scope)
            else:
                response = Response(status_code=CLIENT_GONE)
        except Exception as error:  # the client learns of a bug, too, and the log all of it
            response = error_response(told(error))
        finally:
            self._flight.cancel()
        await response(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        outputs = [self._flight.output(index) for index in range(len(self._flight.tickets))]
        usage = total_usage(self._flight, outputs, self._each)
        note(scope, usage, outputs)
        choices = [self._writer.whole(index, output) for index, output in enumerate(outputs)]
        return json_response(self._writer.head.answer(choices, usage))


class Stream(Response, Generic[Whole, Chunk]):
    """An answer as server-sent events, when there is news; a client that goes away frees its rows within a round."""

    def __init__(
        self, service: Service, flight: Flight, writer: Writer[Whole, Chunk], each: int, include_usage: bool
    ) -> None:
        self.background: BackgroundTask | None = None
        self._service, self._flight, self._writer, self._each = service, flight, writer, each
        self._usage: UnsetType | None = None if include_usage else UNSET
        self._unsent = b""  # events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in EVENT_HEADERS.items()]
        headers.append((b"content-type", b"text/event-stream; charset=utf-8"))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await first_of(self._send_all(scope, send), until_gone(receive))
        finally:
            self._flight.cancel()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        flight, ended = self._flight, dict[int, Output]()
        try:
            opened = [self._event(self._writer.opening(*each)) for each in enumerate(flight.requests)]
            if events := b"".join(opened):
                await send(part(events))
            with Silence(self._service.keep_alive_seconds, flight.wake) as silence:
                while True:
                    self._gather(await flight.progress(), ended)
                    if self._unsent:
                        self._service.metrics.between_chunks.observe(silence.end())
                    if len(ended) == len(flight.tickets):
                        break  # the last events go out together with the end, since each sending is a system call
                    if self._unsent:
                        events, self._unsent = self._unsent, b""
                        await send(part(events))
                    elif silence.too_long:
                        silence.too_long = False
                        await send(part(KEEP_ALIVE))
            end = self._end(scope, [ended[index] for index in sorted(ended)])
        except OSError:  # the client has gone
            return
        except Exception as error:  # as above
            problem = told(error)
            note(scope, error=problem)
            end = event(problem.answer)
        await send(part(self._unsent + end, more=False))

    def _gather(self, progress: Sequence[tuple[int, list[Piece], bool]], ended: dict[int, Output]) -> None:
        """Write what has come out as events; the outputs that have ended are added to `ended`."""
        for index, pieces, ends in progress:
            if index in ended:
                continue
            if pieces:
                self._unsent += self._event(self._writer.chunk(index, pieces, self._flight.tickets[index].request))
            if ends:
                ended[index] = output = self._flight.output(index)
                self._unsent += self._event(self._writer.last(index, output))

    def _end(self, scope: Scope, outputs: Sequence[Output]) -> bytes:
        usage = total_usage(self._flight, outputs, self._each)
        note(scope, usage, outputs)
        return (event(self._writer.chunk_head.answer([], usage)) if self._usage is None else b"") + DONE

    def _event(self, choice: Chunk | None) -> bytes:
        return b"" if choice is None else event(self._writer.chunk_head.answer([choice], self._usage))


def delivery_of(flight: Flight, body: Generation, writer: Writer[Whole, Chunk], service: Service) -> Response:
    """Deliver as the body asks, as a stream or in one piece."""
    each = body.n or 1
    if not body.stream:
        return WholeAnswer(service, flight, writer, each)
    options = body.stream_options
    return Stream(service, flight, writer, each, options is not None and options.include_usage)


def event(answer: Any) -> bytes:
    return b"data: %b\n\n" % encode(answer)


def part(events: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": events, "more_body": more}


class Silence:
    """Measures how long a stream says nothing, and wakes it when that is too long.

    It has one timer, which waits on for what is left when it rings: to reset it at each chunk would cost more than the
    chunk.
    """

    def __init__(self, most_seconds: float, wake: Callable[[], None]) -> None:
        self.too_long = False
        self._most_seconds, self._wake = most_seconds, wake
        self._began = perf_counter()

    def __enter__(self) -> Self:
        self._wait(self._most_seconds)
        return self

    def __exit__(self, *raised: object) -> None:
        self._timer.cancel()

    def end(self) -> float:
        """Return how many seconds it has lasted; another begins."""
        began, self._began, self.too_long = self._began, perf_counter(), False
        return self._began - began

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._ring)

    def _ring(self) -> None:
        left = self._began + self._most_seconds - perf_counter()
        if left <= 0:
            self.too_long = True
            self._wake()
        self._wait(left if left > 0 else self._most_seconds)


async def first_of(work: Any, other: Any) -> bool:
    """Run both until one ends, and cancel the other; return whether it was the work, and raise its error."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done: bool = tasks[0].done()
        if done:
            tasks[0].result()
        return done
    finally:
        for task in tasks:
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


def told(error: Exception) -> ApiError:
    """Return what the client is told of an error; the log gets a bug's traceback."""
    problem = api_error(error)
    if problem.status == 500:
        log.error("a request failed: %s", error, exc_info=error)
    return problem
