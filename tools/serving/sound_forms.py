"""Reads the forms in which sound comes: a file, and fields beside it."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request

from .errors import ApiError

FORM = "multipart/form-data"
MOST_FIELDS = 32
YES, NO = ("true", "1"), ("false", "0")
LATER = {  # fields of OpenAI's API that are refused, each with the reason
    "include": "no log-probabilities are given",
    "known_speaker_names": "speakers are not distinguished",
    "known_speaker_references": "speakers are not distinguished",
}


class Form(Struct, forbid_unknown_fields=True):
    """The fields of a form, beside its file."""

    model: str | None = None
    language: str | None = None
    prompt: str = ""
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0
    fallback: bool = False  # beyond OpenAI's API: hear again at higher temperatures what is not good enough
    timestamp_granularities: list[str] = []
    stream: bool = False
    chunking_strategy: Literal["auto"] | None = None


async def read_form(request: Request) -> tuple[bytes, str, Form]:
    """Read a form: the content of its file, what that is called, and the fields."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != FORM:
        raise ApiError(415, f"the body is of the type {kind or 'unknown'}, expected {FORM}; say so")
    try:
        form = await request.form(max_files=1, max_fields=MOST_FIELDS)
    except HTTPException as error:  # as which starlette says what is wrong with a form
        raise ApiError(400, f"the form cannot be read ({error.detail}); send it again") from error
    try:
        file = form.get("file")
        if not isinstance(file, UploadFile):
            raise ApiError(400, "the form has no file, expected one under the name file", "file")
        content = await file.read()
        return content, f"file {file.filename or 'without a name'}", _fields(form)
    finally:
        await form.close()


def _fields(form: FormData) -> Form:
    """Read the fields, which a form has as text; a name that ends with [] may come several times."""
    given: dict[str, Any] = {}
    for name, value in form.multi_items():
        if name == "file":
            continue
        if name.removesuffix("[]") in LATER:
            raise ApiError(400, f"{name} is not supported: {LATER[name.removesuffix('[]')]}; leave it out", name)
        if name.endswith("[]"):
            given.setdefault(name.removesuffix("[]"), []).append(value)
        elif name in ("stream", "fallback"):
            if value not in (*YES, *NO):
                raise ApiError(400, f"{name} is {value!r}, expected true or false", name)
            given[name] = value in YES
        else:
            given[name] = value
    try:
        found = msgspec.convert(given, Form, strict=False)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"a field of the form is refused: {error}") from error
    field = "timestamp_granularities"
    if set(found.timestamp_granularities) - {"segment"}:
        raise ApiError(400, f"{field} are for segments alone, words have no times", field)
    return found
