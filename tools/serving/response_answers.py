"""Answer /v1/responses, whole or as the events of a stream."""

import secrets
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from ...runtime import Output, Request, SamplingParams, TokenLogprob
from .answers import ChatLogprob, Usage
from .delivery import named_event
from .errors import ApiError
from .parts import Part, PartWriter
from .response_bodies import FlatTool, Reasoning, ResponsesBody
from .service import Service
from .tokens import chat_logprobs
from .tool_calls import Reader


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


class CountedInput(Struct):
    """How many tokens an input has."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


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
    store: bool = False
    background: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    service_tier: Literal["default"] = "default"
    object: Literal["response"] = "response"


class ResponseWriter(PartWriter):
    """Writes responses: each part is an item."""

    def __init__(
        self, reader: Reader, body: ResponsesBody, params: SamplingParams, service: Service, caller: str
    ) -> None:
        super().__init__(reader)
        self._keep = partial(service.kept_answers.keep, caller)
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
        answer = msgspec.structs.replace(
            self._head,
            status="completed" if whole else "incomplete",
            completed_at=int(time.time()) if whole else None,
            incomplete_details=None if whole else Incomplete("max_output_tokens"),
            output=items,
            usage=ResponseUsage(
                usage.prompt_tokens, cached, usage.completion_tokens, OutputDetails(), usage.total_tokens
            ),
        )
        if answer.store:
            self._keep(answer.id, msgspec.json.encode(answer))
        return answer

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
        user=body.user if isinstance(body.user, str) else None,  # whatever it is, it changes nothing
        store=bool(body.store),
    )
