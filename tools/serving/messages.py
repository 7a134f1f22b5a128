"""POST /v1/messages and its count_tokens: Anthropic's API, by way of a chat."""

import json
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal, cast

from msgspec import UNSET, Struct, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ...runtime import Output, Request, TokenLogprob
from .answers import InputTokens, Usage
from .bodies import (
    CalledFunction,
    ChatBody,
    Function,
    ImagePart,
    ImageUrl,
    Message,
    NamedFunction,
    NamedTool,
    PastCall,
    Sampling,
    TextPart,
    Tool,
)
from .chat import conversation_of, converse
from .delivery import delivery_of, json_response, named_event
from .errors import ApiError, in_terms_of
from .message_bodies import (
    CountedBody,
    ImageBlock,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UrlSource,
)
from .parts import Part, PartWriter
from .raw_bodies import body_of
from .service import Service
from .tool_calls import Reader, arguments_of

NAMES = {"max_completion_tokens": "max_tokens", "response_format": "output_config.format"}  # as this API calls them
ENDS = {"length": "max_tokens", "stop": "end_turn"}
EFFORTS = {"max": "xhigh"}


class MessagesUsage(Struct):
    """`input_tokens` are those that had to be read."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class Content(Struct, kw_only=True):
    """A block of an answer: text, thinking, or the use of a tool."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class MessageAnswer(Struct, kw_only=True):
    id: str
    model: str
    content: list[Content]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class MessageWriter(PartWriter):
    """Writes messages: each part is a block."""

    def __init__(self, reader: Reader, model: str) -> None:
        super().__init__(reader)
        self._id, self._model = f"msg_{secrets.token_hex(12)}", model

    def answer(self, output: Output, usage: Usage) -> MessageAnswer:
        reason, sequence = self._stop(output)
        return MessageAnswer(
            id=self._id,
            model=self._model,
            content=[_block(part) for part in self.parts],
            stop_reason=reason,
            stop_sequence=sequence,
            usage=_usage(usage),
        )

    def start(self, request: Request) -> Iterator[bytes]:
        usage = MessagesUsage(len(request.prompt), 0)
        yield _event("message_start", message=MessageAnswer(id=self._id, model=self._model, content=[], usage=usage))

    def begun(self, part: Part) -> Iterator[bytes]:
        yield _event("content_block_start", index=len(self.parts) - 1, content_block=_block(part))

    def added(self, part: Part, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[bytes]:
        kind, name = {
            "text": ("text_delta", "text"),
            "reasoning": ("thinking_delta", "thinking"),
            "call": ("input_json_delta", "partial_json"),
        }[part.kind]
        yield _event("content_block_delta", index=len(self.parts) - 1, delta={"type": kind, name: text})

    def ended(self, part: Part) -> Iterator[bytes]:
        yield _event("content_block_stop", index=len(self.parts) - 1)

    def finish(self, output: Output, usage: Usage) -> Iterator[bytes]:
        reason, sequence = self._stop(output)
        yield _event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=_usage(usage))
        yield _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", error.answer_to("/v1/messages"))

    def _stop(self, output: Output) -> tuple[Any, str | None]:
        if isinstance(output.stopped_by, str):
            return "stop_sequence", output.stopped_by
        called = self._reader.calls and output.finish_reason == "stop"
        return "tool_use" if called else ENDS[output.finish_reason], None


def _event(name: str, **fields: Any) -> bytes:
    return named_event(name, {"type": name, **fields})


def _block(part: Part) -> Content:
    match part.kind:
        case "text":
            return Content(type="text", text=part.text)
        case "reasoning":
            return Content(type="thinking", thinking=part.text, signature="")
    found = arguments_of(part.text) if part.text else {}
    return Content(type="tool_use", id=part.call_id, name=part.name, input=found if isinstance(found, dict) else {})


def _usage(usage: Usage) -> MessagesUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessagesUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


async def answer_messages(request: HttpRequest) -> Response:
    service: Service = request.app.state.service
    body = await body_of(request, MessagesBody)
    with in_terms_of(NAMES):
        chat = chat_of(body, max_completion_tokens=body.max_tokens, stop=body.stop_sequences)
        group, conversation = await converse(request, service, chat)
    writer = MessageWriter(conversation.reader(), body.model or service.name)
    return delivery_of(group, writer, service, stream=body.stream)


async def count_tokens(request: HttpRequest) -> Response:
    service: Service = request.app.state.service
    body = await body_of(request, CountedBody)
    service.require_model(body.model)
    with in_terms_of(NAMES):
        conversation = await conversation_of(service, chat_of(body), service.most_counted)
    return json_response(InputTokens(len(conversation.read)))


def chat_of(body: CountedBody, **more: Any) -> ChatBody:
    """The same request as a chat. Where the assistant has the last word, it goes on."""
    messages = [] if body.system is None else [Message(role="system", content=_text(body.system))]
    for turn in body.messages:
        messages += _messages_of(turn)
    if not messages:
        raise ApiError(400, "the messages are empty; say something", "messages")
    fields: dict[str, Any] = {name: getattr(body, name) for name in Sampling.__struct_fields__}
    if body.tools:
        fields["tools"] = [
            Tool(
                type="function",
                function=Function(name=tool.name, description=tool.description, parameters=tool.input_schema),
            )
            for tool in body.tools
        ]
        fields["parallel_tool_calls"] = not (body.tool_choice and body.tool_choice.disable_parallel_tool_use)
    fields["tool_choice"] = None if body.tool_choice is None else _choice(body.tool_choice)
    if body.thinking is not None:
        fields["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if body.output_config is not None:
        effort = body.output_config.effort
        fields["reasoning_effort"] = None if effort is None else EFFORTS.get(effort, effort)
        if (form := body.output_config.format) is not None:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema}}
    goes_on = messages[-1].role == "assistant" and bool(messages[-1].content) and not messages[-1].tool_calls
    return ChatBody(messages=messages, continue_final_message=goes_on, **fields, **more)


def _messages_of(turn: Turn) -> Iterator[Message]:
    """Return a turn as messages of a chat: results of tools are messages of their own, before the rest."""
    if isinstance(turn.content, str):
        yield Message(role=turn.role, content=turn.content)
        return
    blocks = turn.content
    for result in blocks:
        if isinstance(result, ToolResultBlock):
            said, failed = _content(result.content or ""), result.is_error
            yield Message(role="tool", tool_call_id=result.tool_use_id, content=said, is_error=failed)
    content = _content([block for block in blocks if isinstance(block, TextBlock | ImageBlock)])
    thinking = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [
        PastCall(
            id=block.id,
            type="function",
            function=CalledFunction(name=block.name, arguments=json.dumps(block.input, ensure_ascii=False)),
        )
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    if content or thinking or calls:
        yield Message(role=turn.role, content=content, reasoning_content=thinking or None, tool_calls=calls or None)


def _content(blocks: str | Sequence[TextBlock | ImageBlock]) -> str | list[TextPart | ImagePart]:
    """Return blocks as a chat has them, and texts alone as one."""
    if isinstance(blocks, str) or not any(isinstance(block, ImageBlock) for block in blocks):
        return _text(cast(str | Sequence[TextBlock], blocks))
    return [_part(block) for block in blocks]


def _part(block: TextBlock | ImageBlock) -> TextPart | ImagePart:
    if isinstance(block, TextBlock):
        return TextPart(text=block.text)
    source = block.source
    url = source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}"
    return ImagePart(image_url=ImageUrl(url=url))


def _text(content: str | Sequence[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def _choice(choice: ToolChoice) -> Any:
    if (choice.name is not None) != (choice.type == "tool"):
        raise ApiError(400, "tool_choice names a tool if its type is tool, and only then", "tool_choice.name")
    if choice.name is not None:
        return NamedTool(function=NamedFunction(name=choice.name))
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
