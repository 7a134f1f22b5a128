"""Bodies that clients send to /v1/responses."""

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from .bodies import MOST_TOOLS, Closed, Count, Ignored, Parts, Sampling, Settings, SomeParts

LOGPROBS = "message.output_text.logprobs"


class Text(Closed, kw_only=True):
    """A part of a message; what was answered may come back with all that it had."""

    text: str
    annotations: Ignored = None
    logprobs: Ignored = None
    prompt_cache_breakpoint: Ignored = None


class InputText(Text, kw_only=True, tag_field="type", tag="input_text"): ...


class OutputText(Text, kw_only=True, tag_field="type", tag="output_text"): ...


class PlainText(Text, kw_only=True, tag_field="type", tag="text"): ...


class ReasoningText(Text, kw_only=True, tag_field="type", tag="reasoning_text"): ...


class SummaryText(Text, kw_only=True, tag_field="type", tag="summary_text"): ...


class InputImage(Closed, kw_only=True, tag_field="type", tag="input_image"):
    image_url: Annotated[str, Meta(min_length=1)]
    detail: Ignored = None  # an image is read as the model's own processor reads it
    file_id: None = None
    prompt_cache_breakpoint: Ignored = None


Said = InputText | OutputText | PlainText | ReasoningText | SummaryText


class MessageItem(Closed, kw_only=True):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Said | InputImage], Parts]
    type: Literal["message"] = "message"
    id: Ignored = None
    status: Ignored = None
    phase: Ignored = None


class CallItem(Closed, kw_only=True):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None
    namespace: Ignored = None
    parallel: Ignored = field(default=None, name="async")
    async_: Ignored = None  # as clients for Python call it


class CallOutputItem(Closed, kw_only=True):
    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[Said | InputImage], Parts]
    id: Ignored = None
    status: Ignored = None
    caller: Ignored = None
    name: Ignored = None
    namespace: Ignored = None


class ReasoningItem(Closed, kw_only=True):
    type: Literal["reasoning"]
    summary: list[Said] | None = None
    content: list[Said] | None = None
    encrypted_content: Ignored = None
    id: Ignored = None
    status: Ignored = None


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
    strict: Ignored = None  # arguments always fit their schema
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    parallel: Literal[False] | None = field(default=None, name="async")


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
    summary: Ignored = None  # reasoning is shown as it is
    generate_summary: Ignored = None


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
    store: bool | None = None
    previous_response_id: None = None
    conversation: None = None
    max_tool_calls: None = None
    chat_template_kwargs: Settings | None = None

    @property
    def logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
