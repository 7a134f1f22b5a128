"""The guards before every endpoint: the key, and the size of bodies."""

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .allowances import Allowances
from .delivery import client_error, error_response
from .errors import ApiError, unavailable
from .keys import Keys

OPEN = ("/health", "/ready")  # what a load balancer asks without a key
CALLER = "trt_spec.caller"  # where in a scope it says whose key was given
MOST_BODY_BYTES = 4 * 2**20
MOST_SEEN_BYTES = 32 * 2**20  # where bodies may hold images
MOST_SOUND_BYTES = 25 * 2**20
MOST_HELD_BYTES = 512 * 2**20  # of all bodies that are coming in or being answered
SOUND = "/v1/audio/"
SEEN = ("/v1/chat/", "/v1/responses", "/v1/messages")


class Entrance:
    """Lets in who has one of the keys; without keys, everybody."""

    def __init__(self, app: ASGIApp, keys: Keys, allowances: Allowances) -> None:
        self._app, self._keys, self._allowances = app, keys, allowances

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys and scope["path"] not in OPEN:
            headers = dict(scope["headers"])
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if b"x-api-key" in headers:  # as Anthropic's clients send it
                scheme, given = b"bearer", headers[b"x-api-key"]
            caller = self._keys.caller(given.strip())
            if scheme.lower() != b"bearer" or caller is None:
                found = "no key" if not given else "a key that is not one of this server's"
                refused = ApiError(
                    401,
                    f"the request has {found}, expected the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                    code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )
                await error_response(refused, scope)(scope, receive, send)
                return
            scope[CALLER] = caller
            if scope["method"] == "POST":
                try:
                    self._allowances.require_request(caller)
                except ApiError as error:
                    await error_response(error, scope)(scope, receive, send)
                    return
        await self._app(scope, receive, send)


def caller_of(request: Request) -> str:
    """Return what is known of a caller's key; nothing where none is needed."""
    return str(request.scope.get(CALLER, ""))


class BodyLimit:
    """Refuses bodies that are too large before they are read whole, and those whose end a proxy may see elsewhere.

    All that are held together are limited, too: many clients may each let one wait for its last byte.
    """

    def __init__(self, app: ASGIApp, sees: bool = False) -> None:
        self._app, self._sees = app, sees
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, most = dict(scope["headers"]), most_bytes(scope["path"], self._sees)
        if b"content-length" in headers and b"transfer-encoding" in headers:
            await error_response(_two_lengths(), scope)(scope, receive, send)
            return
        announced = headers.get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > most:
            await error_response(_too_large(most), scope)(scope, receive, send)
            return
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            size = len(message.get("body", b""))
            if size and self._held + size > MOST_HELD_BYTES:
                raise unavailable("the server holds as many bytes of bodies as it may; try again soon", "busy")
            read, self._held = read + size, self._held + size
            if read > most:
                raise _too_large(most)
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._held -= read


def most_bytes(path: str, sees: bool = False) -> int:
    """Return the most bytes of a body; `sees` says whether it may hold images."""
    if path.startswith(SOUND):
        return MOST_SOUND_BYTES
    return MOST_SEEN_BYTES if sees and path.startswith(SEEN) else MOST_BODY_BYTES


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body has more than {most:,} bytes; send less", code="body_too_large")


def _two_lengths() -> ApiError:
    said = "the request has Content-Length and Transfer-Encoding, and its body two ends; send one of them"
    return ApiError(400, said, code="two_lengths", headers={"connection": "close"})


class Failures:
    """Says a bug of ours in the API's terms, if nothing was sent yet."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:  # before its body has ended
            return
        except Exception as error:  # whatever it is, the client gets an answer
            if begun or scope["type"] != "http":
                raise
            await error_response(client_error(error), scope)(scope, receive, send)
