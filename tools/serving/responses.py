"""POST /v1/responses: OpenAI's newer API, by way of a chat. No answer is kept."""

import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ...runtime import Output, Request, SamplingParams, TokenLogprob
from .answers import ChatLogprob, Usage
from .bodies import (
    MOST_TOOLS,
    AllowedTools,
    CalledFunction,
    ChatBody,
    Closed,
    Count,
    Function,
    Message,
    NamedFunction,
    NamedTool,
    Parts,
    PastCall,
    Sampling,
    Settings,
    SomeParts,
    SomeTools,
    Tool,
    converted,
)
from .chat import converse
from .delivery import delivery_of, named_event
from .errors import ApiError, in_terms_of
from .parts import Part, PartWriter
from .service import Service, body_of
from .tokens import chat_logprobs
from .tool_calls import Reader

NAMES = {  # of a chat's fields, as this API calls them
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
LOGPROBS = "message.output_text.logprobs"


class Said(Closed, kw_only=True):
    """A part of a message; what was answered may come back with all that it had."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Closed, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Said], Parts]
    type: Literal["message"] = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(Closed, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutputItem(Closed, kw_only=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[Said], Parts]
    id: str | None = None
    status: str | None = None


class ReasoningItem(Closed, kw_only=True):
    type: Literal["reasoning"]
    summary: list[Said] | None = None
    content: list[Said] | None = None
    encrypted_content: None = None
    id: str | None = None
    status: str | None = None


ITEMS: dict[str, type[MessageItem | CallItem | CallOutputItem | ReasoningItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
}


class FlatTool(Closed, kw_only=True):
    type: Literal["function"]
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FlatName(Closed, kw_only=True, tag_field="type", tag="function"):
    name: str


class FlatSome(Closed, kw_only=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatName], Meta(min_length=1, max_length=MOST_TOOLS)]


class TextConfig(Closed, kw_only=True):
    format: dict[str, Any] | None = None
    verbosity: None = None


class Reasoning(Closed, kw_only=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: str | None = None  # accepted without effect: reasoning is shown as it is
    generate_summary: str | None = None


class ObfuscationOption(Closed, kw_only=True):
    include_obfuscation: bool = False


class ResponsesBody(Sampling, kw_only=True):
    input: str | Annotated[list[dict[str, Any]], SomeParts]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[FlatTool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatName | FlatSome | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    stream_options: ObfuscationOption | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    previous_response_id: None = None
    conversation: None = None
    max_tool_calls: None = None
    chat_template_kwargs: Settings | None = None

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)


class TextContent(Struct, kw_only=True):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[Any] | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET


class Item(Struct, kw_only=True):
    """An item of an answer: a message, reasoning, or a call of a function."""

    type: Literal["message", "reasoning", "function_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | UnsetType = UNSET
    summary: list[Any] | UnsetType = UNSET
    content: list[TextContent] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class InputDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class Incomplete(Struct):
    reason: Literal["max_output_tokens"]


class Failed(Struct):
    code: str
    message: str


class ResponseAnswer(Struct, kw_only=True):
    """A response, which says again what was asked."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[Item]
    parallel_tool_calls: bool
    tools: list[FlatTool]
    tool_choice: Any
    text: dict[str, Any]
    reasoning: dict[str, Any]
    temperature: float
    top_p: float
    instructions: str | None
    max_output_tokens: int | None
    top_logprobs: int
    metadata: dict[str, str]
    user: str | None
    completed_at: int | None = None
    error: Failed | None = None
    incomplete_details: Incomplete | None = None
    usage: ResponseUsage | None = None
    previous_response_id: None = None
    store: Literal[False] = False
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    service_tier: Literal["default"] = "default"
    object: Literal["response"] = "response"


class ResponseWriter(PartWriter):
    """Writes responses: each part is an item."""

    def __init__(self, reader: Reader, body: ResponsesBody, params: SamplingParams, service: Service) -> None:
        super().__init__(reader)
        self._body, self._spelling = body, service.spelling
        self._ids: list[str] = []  # of the items
        self._number = -1  # of the last event
        self._head = answer_head(body, params, service.name)

    def answer(self, output: Output, usage: Usage) -> ResponseAnswer:
        if not self.parts:
            self.parts.append(Part("text"))
        for part in self.parts[len(self._ids) :]:
            self._ids.append(_item_id(part))
        whole = output.finish_reason == "stop"
        items = [self._item(place, "completed") for place in range(len(self.parts))]
        if not whole:
            items[-1].status = "incomplete"
        cached = InputDetails(usage.prompt_tokens_details.cached_tokens)
        return msgspec.structs.replace(
            self._head,
            status="completed" if whole else "incomplete",
            completed_at=int(time.time()) if whole else None,
            incomplete_details=None if whole else Incomplete("max_output_tokens"),
            output=items,
            usage=ResponseUsage(
                usage.prompt_tokens, cached, usage.completion_tokens, OutputDetails(), usage.total_tokens
            ),
        )

    def start(self, request: Request) -> Iterator[bytes]:
        yield self._event("response.created", response=self._head)
        yield self._event("response.in_progress", response=self._head)

    def begun(self, part: Part) -> Iterator[bytes]:
        self._ids.append(_item_id(part))
        item = self._item(-1, "in_progress")
        if part.kind != "call":
            item.content = []
        yield self._event("response.output_item.added", output_index=len(self.parts) - 1, item=item)
        if part.kind != "call":
            yield self._event("response.content_part.added", **self._place(part), part=self._content(part))

    def added(self, part: Part, text: str, logprobs: Sequence[TokenLogprob]) -> Iterator[bytes]:
        fields: dict[str, Any] = {**self._place(part), "delta": text}
        if part.kind == "text":
            fields["logprobs"] = chat_logprobs(logprobs, self._spelling).content
        options = self._body.stream_options
        if options is not None and options.include_obfuscation:
            fields["obfuscation"] = secrets.token_urlsafe(secrets.randbelow(16))
        yield self._event(f"{STREAMED[part.kind]}.delta", **fields)

    def ended(self, part: Part) -> Iterator[bytes]:
        place = self._place(part)
        if part.kind == "call":
            yield self._event(f"{STREAMED[part.kind]}.done", **place, name=part.name, arguments=part.text)
        else:
            more = {"logprobs": self._logprobs(part)} if part.kind == "text" else {}
            yield self._event(f"{STREAMED[part.kind]}.done", **place, text=part.text, **more)
            yield self._event("response.content_part.done", **place, part=self._content(part))
        place = {"output_index": len(self.parts) - 1, "item": self._item(-1, "completed")}
        yield self._event("response.output_item.done", **place)

    def finish(self, output: Output, usage: Usage) -> Iterator[bytes]:
        answer = self.answer(output, usage)
        yield self._event(f"response.{answer.status}", response=answer)

    def failure(self, error: ApiError) -> bytes:
        said = error.answer.error
        failed = msgspec.structs.replace(
            self._head, status="failed", error=Failed(said.code or said.type, said.message)
        )
        return self._event("response.failed", response=failed)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return named_event(kind, {"type": kind, "sequence_number": self._number, **fields})

    def _place(self, part: Part) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._ids[-1], "output_index": len(self.parts) - 1}
        return place if part.kind == "call" else place | {"content_index": 0}

    def _item(self, place: int, status: Literal["in_progress", "completed"]) -> Item:
        part, name = self.parts[place], self._ids[place]
        match part.kind:
            case "call":
                called: dict[str, Any] = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
                return Item(type="function_call", id=name, status=status, **called)
            case "reasoning":
                return Item(type="reasoning", id=name, status=status, summary=[], content=[self._content(part)])
        return Item(type="message", id=name, status=status, role="assistant", content=[self._content(part)])

    def _content(self, part: Part) -> TextContent:
        if part.kind == "reasoning":
            return TextContent(type="reasoning_text", text=part.text)
        return TextContent(type="output_text", text=part.text, annotations=[], logprobs=self._logprobs(part))

    def _logprobs(self, part: Part) -> list[ChatLogprob]:
        return chat_logprobs(part.logprobs, self._spelling).content


STREAMED = {
    "text": "response.output_text",
    "reasoning": "response.reasoning_text",
    "call": "response.function_call_arguments",
}
PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


def _item_id(part: Part) -> str:
    return f"{PREFIXES[part.kind]}_{secrets.token_hex(12)}"


def answer_head(body: ResponsesBody, params: SamplingParams, name: str) -> ResponseAnswer:
    """Return the answer to a body before anything has come out."""
    reasoning = body.reasoning or Reasoning()
    text = {"format": (body.text.format if body.text else None) or {"type": "text"}}
    return ResponseAnswer(
        id=f"resp_{secrets.token_hex(12)}",
        created_at=int(time.time()),
        model=body.model or name,
        status="in_progress",
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        tools=body.tools or [],
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        text=text,
        reasoning={"effort": reasoning.effort, "summary": reasoning.summary},
        temperature=params.temperature,
        top_p=params.top_p,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        top_logprobs=body.top_logprobs or 0,
        metadata=body.metadata or {},
        user=body.user,
    )


async def respond(request: HttpRequest) -> Response:
    service: Service = request.app.state.service
    body = await body_of(request, ResponsesBody)
    with in_terms_of(NAMES):
        flight, conversation = await converse(request, service, chat_of(body))
    writer = ResponseWriter(conversation.reader(), body, flight.requests[0].params, service)
    return delivery_of(flight, writer, service, stream=body.stream)


def chat_of(body: ResponsesBody) -> ChatBody:
    """The same request as a chat."""
    messages = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        messages += _messages_of(body.input)
    fields: dict[str, Any] = {name: getattr(body, name) for name in Sampling.__struct_fields__}
    if body.tools:
        fields["tools"] = [
            Tool(
                type="function",
                function=Function(name=tool.name, description=tool.description, parameters=tool.parameters or {}),
            )
            for tool in body.tools
        ]
        fields["tool_choice"] = _choice(body.tool_choice)
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    elif body.tool_choice not in (None, "auto", "none"):
        raise ApiError(400, "tool_choice is given, but there are no tools; send tools, too", "tool_choice")
    if body.text is not None and body.text.format is not None:
        fields["response_format"] = _format(body.text.format)
    return ChatBody(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        logprobs=body.logprobs,
        top_logprobs=body.top_logprobs if body.logprobs else None,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        chat_template_kwargs=body.chat_template_kwargs,
        **fields,
    )


def _messages_of(items: Sequence[dict[str, Any]]) -> list[Message]:
    """What items are in a chat: calls and reasoning belong to the assistant's message beside them."""
    messages: list[Message] = []
    thought: str | None = None
    for place, fields in enumerate(items):
        kind = fields.get("type", "message")
        if kind not in ITEMS:
            said = f"input[{place}] has the type {kind!r}, expected one of {', '.join(ITEMS)}"
            raise ApiError(400, said, f"input[{place}].type", "invalid_value")
        item = converted(fields, ITEMS[kind], f"input[{place}]")
        if isinstance(item, ReasoningItem):
            thought = _text(item.content or item.summary or "")
            continue
        if isinstance(item, CallOutputItem):
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=_text(item.output)))
        elif isinstance(item, CallItem):
            function = CalledFunction(name=item.name, arguments=item.arguments)
            call = PastCall(id=item.call_id, type="function", function=function)
            last = messages[-1] if messages else None
            if last is not None and last.role == "assistant" and thought is None:
                last.tool_calls = last.tool_calls or []
                last.tool_calls.append(call)
            else:
                messages.append(Message(role="assistant", tool_calls=[call], reasoning_content=thought))
        else:
            own = thought if item.role == "assistant" else None
            messages.append(Message(role=item.role, content=_text(item.content), reasoning_content=own))
        thought = None
    if not messages:
        raise ApiError(400, "the input holds no message; say something", "input")
    return messages


def _text(content: str | Sequence[Said]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _choice(choice: Any) -> Any:
    if isinstance(choice, FlatName):
        return NamedTool(function=NamedFunction(name=choice.name))
    if isinstance(choice, FlatSome):
        names = [NamedTool(function=NamedFunction(name=tool.name)) for tool in choice.tools]
        return SomeTools(allowed_tools=AllowedTools(mode=choice.mode, tools=names))
    return choice


def _format(form: dict[str, Any]) -> dict[str, Any]:
    """A format as a chat has it: what this API has beside the type goes one floor down."""
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
