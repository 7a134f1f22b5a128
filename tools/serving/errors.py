"""Errors as OpenAI's API has them: a status, and `{"error": {message, type, param, code}}`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import msgspec

from ...engines import RequestError, TrtSpecError
from ...runtime.grammars.trials import Untried
from .tokenising import TooManyTokens

RETRY_AFTER_SECONDS = 1
MOST_SAID = 1000  # characters of what is said to be wrong: a client's own text may be part of it
MOST_NAMED = 200  # characters of the field at fault

TYPES = {  # by status
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}
MESSAGES = "/v1/messages"
MESSAGES_TYPES = {413: "request_too_large", 500: "api_error"}  # where its API has other words
STATUSES: dict[type[Exception], tuple[int, str | None]] = {  # the first that fits: status and code
    TooManyTokens: (400, "context_length_exceeded"),
    Untried: (503, "busy"),
    RequestError: (400, None),
    TrtSpecError: (500, "engine_error"),
    Exception: (500, None),
}
NAMES = {"max_new_tokens": "max_tokens", "grammar": "response_format"}  # parameters that the API calls otherwise


class Problem(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    error: Problem


class MessagesProblem(msgspec.Struct):
    type: str
    message: str


class MessagesError(msgspec.Struct):
    """An error as Anthropic's API has it."""

    error: MessagesProblem
    type: Literal["error"] = "error"


class ApiError(Exception):
    """An error that a client gets instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = shortened(message, MOST_SAID)
        param = None if param is None else shortened(param, MOST_NAMED)
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.answer = ErrorAnswer(Problem(message, TYPES.get(status, "invalid_request_error"), param, code))

    def answer_to(self, path: str) -> ErrorAnswer | MessagesError:
        """Return what the API of this path says of it."""
        if not path.startswith(MESSAGES):
            return self.answer
        kind = MESSAGES_TYPES.get(self.status, self.answer.error.type)
        return MessagesError(MessagesProblem(kind, self.answer.error.message))


def shortened(text: str, most: int) -> str:
    """Leave out the middle of what is long: its beginning says what is wrong, its end what to do."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"


@contextmanager
def in_terms_of(names: Mapping[str, str]) -> Iterator[None]:
    """Name fields at fault as the API that was asked does."""
    try:
        yield
    except (ApiError, RequestError) as error:
        problem = api_error(error)
        said = problem.answer.error
        ours = error.field if isinstance(error, RequestError) else None
        said.param = names.get(ours or "") or names.get(said.param or "", said.param)
        raise problem from error


def unavailable(message: str, code: str) -> ApiError:
    """Ask the client to come back."""
    return ApiError(503, message, code=code, headers={"retry-after": str(RETRY_AFTER_SECONDS)})


def api_error(error: Exception) -> ApiError:
    """Say an error of ours in the API's terms; of a bug the client learns nothing but that it is one."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RecursionError):  # as JSON makes it that is nested by the hundreds
        return ApiError(400, "the request is nested too deeply; send what the API describes")
    status, code = next(found for kind, found in STATUSES.items() if isinstance(error, kind))
    if not isinstance(error, TrtSpecError):
        return ApiError(500, "the server has failed; its log says more", code="internal_error")
    if status == 503:
        return unavailable(str(error), str(code))
    field = error.field if isinstance(error, RequestError) else None
    return ApiError(status, str(error), NAMES.get(field or "", field), code)
