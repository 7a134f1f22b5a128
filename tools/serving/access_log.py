"""One line about each request, as text or as JSON; nothing of what was said, unless that is asked for."""

import json
import logging
import re
import secrets
import sys
from collections.abc import Callable, MutableMapping, Sequence
from time import perf_counter
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...runtime import Output
from .answers import Usage
from .errors import MOST_NAMED, ApiError, shortened

log = logging.getLogger("trt_spec.access")
NOTES = "trt_spec.notes"  # where in a scope the endpoints leave what the log should say
CLIENT_GONE = 499
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
QUIET = ("/health", "/ready", "/metrics")  # asked every few seconds: at level debug only


def note(
    scope: Scope, usage: Usage | None = None, outputs: Sequence[Output] = (), *, error: ApiError | None = None
) -> None:
    """Leave for the log what came out."""
    notes = scope.setdefault(NOTES, {})
    if usage is not None:
        notes["prompt_tokens"], notes["completion_tokens"] = usage.prompt_tokens, usage.completion_tokens
        notes["finish"] = ",".join(sorted({output.finish_reason for output in outputs}))
    if error is not None:
        notes["error"] = error.answer.error.code or error.answer.error.type


def note_prompt(scope: Scope, prompt: object) -> None:
    """Leave the prompt, which is logged only where that was asked for."""
    scope.setdefault(NOTES, {})["prompt"] = prompt


class AccessLog:
    """Gives each request an id, and logs it when its answer is through."""

    def __init__(self, app: ASGIApp, prompts: bool, count: Callable[[str, str, int], None]) -> None:
        self._app, self._prompts, self._count = app, prompts, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, complete = perf_counter(), 0, False
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        request_id = given if REQUEST_ID.fullmatch(given) else secrets.token_hex(12)
        notes: MutableMapping[str, Any] = scope.setdefault(NOTES, {})

        async def watched(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            else:
                complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watched)
        finally:
            if not self._prompts:
                notes.pop("prompt", None)
            client = scope.get("client")
            found = notes["status"] = status if complete else CLIENT_GONE
            self._count(scope["method"], scope["path"], found)
            fields = {
                "id": request_id,
                "client": client[0] if client else None,
                "method": scope["method"],
                "path": shortened(scope["path"], MOST_NAMED),
                "status": found,
                "ms": round(1e3 * (perf_counter() - began), 1),
                **notes,
            }
            log.log(logging.DEBUG if scope["path"] in QUIET else logging.INFO, "request", extra={"fields": fields})


class TextForm(logging.Formatter):
    """`2026-11-22T10:00:00.123 info …`, with the fields of a request as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = "\n".join(map(visible, super().format(record).split("\n")))
        fields = getattr(record, "fields", {})
        return " ".join([line, *(f"{name}={_bare(value)}" for name, value in fields.items())])


class JsonForm(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        time = f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{int(record.msecs):03}"
        fields = {"time": time, "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return visible(json.dumps(fields | getattr(record, "fields", {}), ensure_ascii=False))


def _bare(value: object) -> str:
    """A value on one line, in quotes if it is more than a word."""
    text = str(value)
    return text if re.fullmatch(r"[\w./:,-]+", text, re.ASCII) else visible(json.dumps(text, ensure_ascii=False))


def visible(written: str) -> str:
    """Escape what JSON leaves as it is, but a terminal would obey or hide: controls, and marks of direction."""
    if written.isprintable():  # nearly always
        return written
    return "".join(one if one.isprintable() else _escaped(one) for one in written)


def _escaped(one: str) -> str:
    written = json.dumps(one)[1:-1]
    return f"\\u{ord(one):04x}" if written == one else written  # JSON takes DEL as it is


def set_up_logging(form: str, level: str) -> None:
    """Log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonForm() if form == "json" else TextForm())
    for name in ("trt_spec", "uvicorn", "opentelemetry"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper() if name == "trt_spec" else "WARNING")
