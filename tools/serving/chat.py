"""POST /v1/chat/completions: the bundle's chat template turns messages into a prompt, and the model answers."""

import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ...runtime import Output, Piece, Request
from .access_log import note_prompt
from .answers import ChatChoice, ChunkChoice, Delta, FinishReason, Head
from .bodies import ChatBody, Message, read_body
from .delivery import delivery_of, extended, reason_of
from .errors import ApiError
from .guard import caller_of
from .service import Service, raw_body
from .tokens import chat_logprobs
from .tool_calls import Reader, arguments_of, grammar_of_call, message_of, reader_of, tools_of

NO_TEMPLATE = (
    "this bundle has no chat template, so messages cannot become a prompt; send a prompt to /v1/completions, or start "
    "the server with --chat-template FILE"
)


class ChatWriter:
    """Writes chat completions."""

    def __init__(self, service: Service, body: ChatBody, reader: Callable[[], Reader]) -> None:
        name = f"chatcmpl-{secrets.token_hex(12)}"
        self.head = Head(name, "chat.completion", service.name, service.fingerprint)
        self.chunk_head = Head(name, "chat.completion.chunk", service.name, service.fingerprint)
        self._spelling, self._body = service.spelling, body
        self._readers: defaultdict[int, Reader] = defaultdict(reader)  # of each choice

    def whole(self, index: int, output: Output) -> ChatChoice:
        message = message_of(self._readers[index], output.text, output.finish_reason == "stop")
        choice = ChatChoice(index=index, message=message, finish_reason=self._reason(index, output))
        if output.logprobs is not None:
            choice.logprobs = chat_logprobs(output.logprobs, self._spelling)
        if self._body.return_token_ids:
            choice.token_ids = list(output.token_ids)
        return extended(choice, self._body, output)

    def opening(self, index: int, request: Request) -> ChunkChoice:
        return ChunkChoice(index=index, delta=Delta(role="assistant", content=""))

    def chunk(self, index: int, pieces: Sequence[Piece], request: Request) -> ChunkChoice | None:
        text = "".join(piece.text for piece in pieces)
        logprobs = [one for piece in pieces for one in piece.logprobs]
        if not (text or logprobs or self._body.return_token_ids):
            return None
        choice = ChunkChoice(index=index, delta=self._readers[index].feed(text))
        if self._body.logprobs:
            choice.logprobs = chat_logprobs(logprobs, self._spelling)
        if self._body.return_token_ids:
            choice.token_ids = [token for piece in pieces for token in piece.token_ids]
        return choice

    def last(self, index: int, output: Output) -> ChunkChoice:
        rest = self._readers[index].end(output.finish_reason == "stop")
        choice = ChunkChoice(index=index, delta=rest, finish_reason=self._reason(index, output))
        return extended(choice, self._body, output)

    def _reason(self, index: int, output: Output) -> FinishReason:
        reason = reason_of(output)
        return "tool_calls" if self._readers[index].calls and reason == "stop" else reason


async def chat(request: HttpRequest) -> Response:
    service: Service = request.app.state.service
    body = read_body(await raw_body(request), ChatBody)
    service.require_model(body.model)
    service.stepper.refuse_if_full(body.n or 1)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs says how many log-probabilities, but logprobs is not true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise ApiError(400, "max_tokens and max_completion_tokens mean the same; send one", "max_tokens")
    marks = None if service.template is None else service.template.call_marks
    call = grammar_of_call(body, marks)
    writer = ChatWriter(service, body, partial(reader_of, body, marks))
    settings = (body.chat_template_kwargs or {}) | {"tools": tools_of(body)}
    prompt = await prompt_of(service, body.messages, settings)
    note_prompt(request.scope, [message.content for message in body.messages])
    wanted = await service.submissions(
        body,
        [prompt],
        body.max_completion_tokens if body.max_tokens is None else body.max_tokens,
        caller_of(request),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        **({"grammar": call} if call else {}),
    )
    flight = service.stepper.submit(wanted, every_round=bool(body.stream))
    return delivery_of(flight, body, writer, service)


async def prompt_of(service: Service, messages: Sequence[Message], settings: Mapping[str, object]) -> list[int]:
    """The token ids of a conversation, ready for the assistant's answer."""
    if service.template is None:
        raise ApiError(400, NO_TEMPLATE, "messages", "no_chat_template")
    each = [plain(message) for message in messages]
    characters = sum(len(str(message["content"])) for message in each)
    service.longest.require(characters, "messages")
    ids = await service.aside(partial(service.template.encode, each, settings), characters)
    if not ids:
        raise ApiError(400, "the chat template makes an empty prompt of these messages; say something", "messages")
    return ids


def plain(message: Message) -> dict[str, object]:
    """A message as templates know it: its content is one text."""
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    fields: dict[str, object] = {"role": message.role, "content": content or ""}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {"name": call.function.name, "arguments": arguments_of(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("name", "reasoning_content", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    return fields
