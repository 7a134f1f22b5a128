"""POST /v1/audio/transcriptions and translations: sound is written down by a bundle of a Whisper."""

import asyncio
from contextlib import ExitStack
from typing import Any, Literal

import msgspec
from msgspec import Struct, to_builtins
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ...runtime import Output, SamplingParams
from ...runtime.memory.adapter_pool import Loaded
from ...runtime.transcribing.fallback import NONE, usual_above
from ...runtime.transcribing.hearing import Window
from ...runtime.transcribing.tokens import TASKS
from ...runtime.transcribing.transcriber import Work
from ...runtime.transcribing.transcript import Segment, Transcript
from ..sound_files import sound_of
from ..transcripts import FORMATS, fields_of
from .access_log import note
from .answers import PromptDetails, Usage
from .delivery import (
    CLIENT_GONE,
    KEEP_ALIVE,
    client_error,
    error_response,
    event,
    events_start,
    first_of,
    part,
    until_gone,
)
from .errors import ApiError, in_terms_of, unavailable
from .guard import caller_of
from .service import LONG_TEXT, Service
from .sound_forms import read_form
from .tickets import RequestGroup, Submission

MOST_HOURS = 2.0  # of sound in a form, whose pictures take 115 MB an hour
MOST_FORMS = 8  # that are written down together


class Seconds(Struct):
    seconds: float
    type: Literal["duration"] = "duration"


class Transcription(Struct):
    text: str
    usage: Seconds


class Delta(Struct):
    delta: str
    type: Literal["transcript.text.delta"] = "transcript.text.delta"


class Done(Struct):
    text: str
    usage: Seconds
    type: Literal["transcript.text.done"] = "transcript.text.done"


async def transcribe(request: Request) -> Response:
    return await _write_down(request, TASKS[0])


async def translate(request: Request) -> Response:
    return await _write_down(request, TASKS[1])


async def _write_down(request: Request, task: str) -> Response:
    service: Service = request.app.state.service
    _refuse_other_pages(request)
    transcriber = service.transcriber
    if len(service.stepper.places) >= MOST_FORMS:
        raise unavailable(f"{MOST_FORMS} sounds are being written down; try again soon", "queue_full")
    with ExitStack() as stack:
        stack.enter_context(service.stepper.place(caller_of(request)))
        content, name, form = await read_form(request)
        service.require_model(form.model)
        transcriber.tokens.check(form.language, task)
        named = service.adapter_of(form.model)
        adapter = None if named is None else stack.enter_context(service.decoder.holding_adapter(named))
        news = Pieces()

        def begin() -> tuple[Work, Window]:
            work = transcriber.work(
                sound_of(content, name, MOST_HOURS),
                language=form.language,
                task=task,
                timed=form.response_format in ("srt", "vtt", "verbose_json"),
                params=SamplingParams(temperature=form.temperature),
                fallback=usual_above(form.temperature) if form.fallback else NONE,
                prompt=form.prompt,
                on_segment=news.add,
            )
            return work, next(work)

        with in_terms_of({"samples": "file"}):
            work, asked = await service.aside(begin, LONG_TEXT)  # one after another: it takes much memory
        kind = Streamed if form.stream else Whole
        listening = Listening(service, work, asked, caller_of(request), adapter)
        return kind(service, listening, news, form.response_format, stack.pop_all())


def _refuse_other_pages(request: Request) -> None:
    """Refuse a form that a page of another site sends, which its browser does without asking."""
    origin, allowed = request.headers.get("origin"), request.app.state.origins
    if origin is not None and origin not in allowed and "*" not in allowed:
        raise ApiError(403, f"pages of {origin} may not ask here; --allow-origin lets them", code="origin_refused")


class Pieces:
    """The segments that have been heard and not been sent."""

    def __init__(self) -> None:
        self.added: list[Segment] = []

    def add(self, segment: Segment) -> None:
        self.added.append(segment)

    def take(self) -> list[Segment]:
        taken, self.added = self.added, []
        return taken


class Listening:
    """Asks the decoder for one window after another, among the requests of other clients."""

    def __init__(self, service: Service, work: Work, first: Window, caller: str, adapter: Loaded | None) -> None:
        self._service, self._work, self._asked, self._caller, self._adapter = service, work, first, caller, adapter
        self._group: RequestGroup | None = None

    async def next(self) -> Transcript | None:
        """Hear a window; return the whole once there is no more."""
        asked = self._asked
        wanted = Submission(
            asked.prompt,
            asked.params,
            self._service.draft_length,
            self._service.drafter,
            self._caller,
            source=asked.source,
            adapter=self._adapter,
        )
        self._group = self._service.stepper.submit([wanted], every_round=False, placed=True)
        await self._group.ended()
        output: Output = self._group.output(0)
        try:
            self._asked = await run_in_threadpool(self._send, output)
        except Heard as heard:
            return heard.transcript
        return None

    def _send(self, output: Output) -> Window:
        try:
            return self._work.send(output)
        except StopIteration as ended:  # which no thread can raise
            raise Heard(ended.value) from None

    def cancel(self) -> None:
        if self._group is not None:
            self._group.cancel()


class Heard(Exception):
    """All is heard."""

    def __init__(self, transcript: Transcript) -> None:
        self.transcript = transcript


class Answer(Response):
    """The common part of both answers; a client that goes away frees its row and its place."""

    def __init__(self, service: Service, listening: Listening, pieces: Pieces, kind: str, held: ExitStack) -> None:
        self.background: BackgroundTask | None = None
        self._service, self._listening, self._pieces, self._kind = service, listening, pieces, kind
        self._held = held

    def _let_go(self) -> None:
        self._listening.cancel()
        self._held.close()


class Whole(Answer):
    """An answer in one piece."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        heard: list[Transcript] = []

        async def listen() -> None:
            while not heard:
                if (found := await self._listening.next()) is not None:
                    heard.append(found)

        try:
            if await first_of(listen(), until_gone(receive)):
                _note(scope, heard[0])
                response = _written(heard[0], self._kind)
            else:
                response = Response(status_code=CLIENT_GONE)
        except Exception as error:  # the client learns of a bug, too, and the log all of it
            response = error_response(client_error(error), scope)
        finally:
            self._let_go()
        await response(scope, receive, send)


class Streamed(Answer):
    """An answer as server-sent events, one for each piece of text."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(events_start())
            await first_of(self._send_all(scope, send), until_gone(receive))
        finally:
            self._let_go()

    async def _send_all(self, scope: Scope, send: Send) -> None:
        begun = False
        try:
            while True:
                heard = await self._next(send)
                for segment in self._pieces.take():
                    text = segment.text if begun else segment.text.lstrip()
                    begun = True
                    await send(part(event(Delta(text))))
                if heard is not None:
                    break
            _note(scope, heard)
            end = event(Done(heard.text, Seconds(round(heard.seconds, 3))))
        except OSError:  # the client has gone
            return
        except Exception as error:  # as above
            problem = client_error(error)
            note(scope, error=problem)
            end = event(problem.answer)
        await send(part(end, more=False))

    async def _next(self, send: Send) -> Transcript | None:
        """Hear a window, and say now and then that the stream is alive."""
        hearing = asyncio.ensure_future(self._listening.next())
        try:
            while not (await asyncio.wait({hearing}, timeout=self._service.keep_alive_seconds))[0]:
                await send(part(KEEP_ALIVE))
            return hearing.result()
        finally:
            hearing.cancel()


def _written(transcript: Transcript, kind: str) -> Response:
    if kind in ("text", "srt", "vtt"):
        written = FORMATS["txt" if kind == "text" else kind](transcript)
        return Response(written, media_type="text/plain; charset=utf-8")
    usage = Seconds(round(transcript.seconds, 3))
    if kind == "json":
        answer: Any = Transcription(transcript.text, usage)
    else:
        answer = fields_of(transcript) | {"usage": to_builtins(usage)}
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _note(scope: Scope, transcript: Transcript) -> None:
    said = sum(len(one.token_ids) for one in transcript.segments)
    note(scope, Usage(0, said, said, PromptDetails(0)), ())
