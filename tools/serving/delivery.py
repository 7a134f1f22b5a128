"""Delivers what requests say, whole or as a stream of events, until the client has it or goes away."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Protocol, Self

import msgspec
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from ...runtime import Output, Piece, Request
from .access_log import note
from .answers import CompletionDetails, PromptDetails, Usage
from .errors import ApiError, api_error
from .service import Service
from .tickets import RequestGroup

log = logging.getLogger(__name__)
encode = msgspec.json.encode

UsageOf = Callable[[Sequence[Output]], Usage]

CLIENT_GONE = 499  # nobody reads it but the log
MANY_TOKENS = 500  # with twenty log-probs of each they take ten milliseconds to write
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"


class Writer(Protocol):
    """Writes the answers of one API, whole or as the events of a stream."""

    def whole(self, outputs: Sequence[Output], usage: Usage) -> Any:
        """Return the whole answer, to be written as JSON."""
        ...

    def opening(self, requests: Sequence[Request]) -> bytes:
        """Return the events before the first piece."""
        ...

    def chunk(self, index: int, pieces: Sequence[Piece], request: Request) -> bytes:
        """Return the events of new pieces of a request."""
        ...

    def closing(self, index: int, output: Output, request: Request) -> bytes:
        """Return the events that say why a request ended."""
        ...

    def end(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        """Return the last events."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """Return the events that end a stream before its time."""
        ...


def json_response(answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(encode(answer), status, headers, "application/json")


def error_response(error: ApiError, scope: Scope) -> Response:
    """Say an error in the words of the API that was asked."""
    return json_response(error.answer_to(scope["path"]), error.status, error.headers)


def total_usage(group: RequestGroup, each: int, reads_only: bool, outputs: Sequence[Output]) -> Usage:
    """Count what was read and written; of every `each` outputs the prompt is the same and counts once.

    A decoder writes at least one token; where a client only wants its prompt to be read, that one does not count.
    """
    read = sum(output.usage.prompt_tokens for output in outputs[::each])
    written = 0 if reads_only else sum(output.usage.completion_tokens for output in outputs)
    cached = sum(output.usage.cached_tokens for output in outputs[::each])
    usage = Usage(read, written, read + written, PromptDetails(cached))
    if any(request.prediction for request in group.requests):
        accepted = sum(output.speculation.accepted for output in outputs)
        proposed = sum(output.speculation.proposed for output in outputs)
        usage.completion_tokens_details = CompletionDetails(accepted, proposed - accepted)
    return usage


async def until_gone(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class WholeAnswer(Response):
    """An answer in one piece; a client that goes away frees its rows."""

    def __init__(self, group: RequestGroup, writer: Writer, usage_of: UsageOf) -> None:
        self.background: BackgroundTask | None = None
        self._group, self._writer, self._usage_of = group, writer, usage_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if await first_of(self._group.ended(), until_gone(receive)):
                tokens = sum(len(one.token_ids) + len(one.prompt_logprobs) for one in self._group.requests)
                many = tokens > MANY_TOKENS
                response = await run_in_threadpool(self._answer, scope) if many else self._answer(scope)
            else:
                response = Response(status_code=CLIENT_GONE)
        except Exception as error:  # the client learns of a bug, too, and the log all of it
            response = error_response(client_error(error), scope)
        finally:
            self._group.cancel()
        await response(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        outputs = [self._group.output(index) for index in range(len(self._group.tickets))]
        usage = self._usage_of(outputs)
        note(scope, usage, outputs)
        return json_response(self._writer.whole(outputs, usage))


class Stream(Response):
    """An answer as server-sent events, when there is news; a client that goes away frees its rows within a round."""

    def __init__(self, service: Service, group: RequestGroup, writer: Writer, usage_of: UsageOf) -> None:
        self.background: BackgroundTask | None = None
        self._service, self._group, self._writer, self._usage_of = service, group, writer, usage_of
        self._unsent = b""  # events
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(events_start())
            await first_of(self._send_all(scope, send), until_gone(receive))
        finally:
            self._group.cancel()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        group, ended = self._group, dict[int, Output]()
        try:
            if events := self._writer.opening(group.requests):
                await send(part(events))
            with Silence(self._service.keep_alive_seconds, group.wake) as silence:
                while True:
                    progress = await group.progress()
                    if self._new_tokens(progress) > MANY_TOKENS:
                        await run_in_threadpool(self._gather, progress, ended)
                    else:
                        self._gather(progress, ended)
                    if self._unsent:
                        self._service.metrics.between_chunks.observe(silence.end())
                    if len(ended) == len(group.tickets):
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
            problem = client_error(error)
            note(scope, error=problem)
            end = self._writer.failure(problem)
        await send(part(self._unsent + end, more=False))

    def _new_tokens(self, progress: Sequence[tuple[int, list[Piece], bool]]) -> int:
        """Count those that are to be written, and of a prompt that may be echoed with the first."""
        written = sum(len(piece.token_ids) for _, pieces, _ in progress for piece in pieces)
        echoed = 0 if self._begun else sum(len(request.prompt_logprobs) for request in self._group.requests)
        self._begun = self._begun or written > 0
        return written + echoed

    def _gather(self, progress: Sequence[tuple[int, list[Piece], bool]], ended: dict[int, Output]) -> None:
        """Write what has come out as events; the outputs that have ended are added to `ended`."""
        for index, pieces, ends in progress:
            if index in ended:
                continue
            request = self._group.tickets[index].request
            if pieces:
                self._unsent += self._writer.chunk(index, pieces, request)
            if ends:
                ended[index] = output = self._group.output(index)
                self._unsent += self._writer.closing(index, output, request)

    def _end(self, scope: Scope, outputs: Sequence[Output]) -> bytes:
        usage = self._usage_of(outputs)
        note(scope, usage, outputs)
        return self._writer.end(outputs, usage)


def delivery_of(
    group: RequestGroup,
    writer: Writer,
    service: Service,
    *,
    stream: bool | None,
    each: int = 1,
    reads_only: bool = False,
) -> Response:
    """Deliver as a stream or in one piece; of every `each` requests the prompt is the same."""
    usage_of = partial(total_usage, group, each, reads_only)
    return Stream(service, group, writer, usage_of) if stream else WholeAnswer(group, writer, usage_of)


def event(answer: Any) -> bytes:
    return b"data: %b\n\n" % encode(answer)


def named_event(name: str, answer: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(answer))


def events_start() -> Message:
    """Return a new message each time: what wraps an application may add headers to it."""
    headers = [
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),
        (b"content-type", b"text/event-stream; charset=utf-8"),
    ]
    return {"type": "http.response.start", "status": 200, "headers": headers}


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


def client_error(error: Exception) -> ApiError:
    """Return what the client gets of an error; the log gets a bug's traceback."""
    problem = api_error(error)
    if problem.status == 500:
        log.error("a request failed: %s", error, exc_info=error)
    return problem
