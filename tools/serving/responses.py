"""POST /v1/responses: OpenAI's newer API, by way of a chat. An answer is kept in memory if its client asks for it."""

from collections.abc import Sequence
from typing import Any, cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from .bodies import (
    AllowedTools,
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
    SomeTools,
    TextPart,
    Tool,
    converted,
)
from .chat import conversation_of, converse
from .delivery import delivery_of, json_response
from .errors import ApiError, in_terms_of
from .guard import caller_of
from .raw_bodies import body_of
from .response_answers import CountedInput, ResponseWriter
from .response_bodies import (
    ITEMS,
    CallItem,
    CallOutputItem,
    FlatName,
    FlatSome,
    InputImage,
    ReasoningItem,
    ResponsesBody,
    Said,
)
from .service import Service

NAMES = {  # of a chat's fields, as this API calls them
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


async def respond(request: HttpRequest) -> Response:
    service: Service = request.app.state.service
    body = await body_of(request, ResponsesBody)
    with in_terms_of(NAMES):
        group, conversation = await converse(request, service, chat_of(body))
    writer = ResponseWriter(conversation.reader(), body, group.requests[0].params, service, caller_of(request))
    return delivery_of(group, writer, service, stream=body.stream)


async def count_input(request: HttpRequest) -> Response:
    """Count what the model would read."""
    service: Service = request.app.state.service
    body = await body_of(request, ResponsesBody)
    service.require_model(body.model)
    with in_terms_of(NAMES):
        conversation = await conversation_of(service, chat_of(body), service.most_counted)
    return json_response(CountedInput(len(conversation.read)))


async def kept_response(request: HttpRequest) -> Response:
    """Return a response that was stored, to whoever has asked for it with the same key."""
    service: Service = request.app.state.service
    for field, value in request.query_params.items():
        if (field, value) != ("stream", "false"):
            said = f"{field}={value} is refused: a stored response comes whole, as it was answered; leave it out"
            raise ApiError(400, said, field, "unsupported_parameter")
    name = request.path_params["response_id"]
    answer = service.kept_answers.find(caller_of(request), name)
    if answer is None:
        said = f"response {name!r} is not kept here; send store: true with its request, and ask for it soon"
        raise ApiError(404, said, "response_id", "response_not_found")
    return Response(answer, media_type="application/json")


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
    """Return items as messages of a chat: calls and reasoning belong to the assistant's message beside them."""
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
            messages.append(Message(role="tool", tool_call_id=item.call_id, content=_content(item.output)))
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
            messages.append(Message(role=item.role, content=_content(item.content), reasoning_content=own))
        thought = None
    if not messages:
        raise ApiError(400, "the input holds no message; say something", "input")
    return messages


def _text(content: str | Sequence[Said]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _content(parts: str | Sequence[Said | InputImage]) -> str | list[TextPart | ImagePart]:
    """Return parts as a chat has them, and texts alone as one."""
    if isinstance(parts, str) or not any(isinstance(part, InputImage) for part in parts):
        return _text(cast(str | Sequence[Said], parts))
    return [
        ImagePart(image_url=ImageUrl(url=part.image_url)) if isinstance(part, InputImage) else TextPart(text=part.text)
        for part in parts
    ]


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
