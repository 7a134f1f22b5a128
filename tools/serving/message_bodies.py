"""Bodies that clients send to /v1/messages, in Anthropic's words."""

from typing import Annotated, Any, Literal

from msgspec import Meta

from .bodies import MOST_TOOLS, Closed, Count, Ignored, Parts, Sampling, SomeParts, Stop


class TextBlock(Closed, kw_only=True, tag_field="type", tag="text"):
    text: str
    cache_control: Ignored = None
    citations: Annotated[list[Any], Meta(max_length=0)] | None = None


class Base64Source(Closed, kw_only=True, tag_field="type", tag="base64"):
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: Annotated[str, Meta(min_length=1)]


class UrlSource(Closed, kw_only=True, tag_field="type", tag="url"):
    url: Annotated[str, Meta(min_length=1)]


class ImageBlock(Closed, kw_only=True, tag_field="type", tag="image"):
    source: Base64Source | UrlSource
    cache_control: Ignored = None


class ThinkingBlock(Closed, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: Ignored = None


class RedactedBlock(Closed, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only another service can read; the model is shown nothing of it."""

    data: Ignored = None


class ToolUseBlock(Closed, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Ignored = None
    caller: Ignored = None
    toolset_name: Ignored = None


class ToolResultBlock(Closed, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | Annotated[list[TextBlock | ImageBlock], Parts] | None = None
    is_error: bool | None = None
    cache_control: Ignored = None
    toolset_name: Ignored = None


Block = TextBlock | ImageBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock


class Turn(Closed, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Parts]


class ClientTool(Closed, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: Ignored = None  # input always fits its schema
    cache_control: Ignored = None
    eager_input_streaming: Ignored = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: Ignored = None


class ToolChoice(Closed, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Closed, kw_only=True):
    """Whether the chat template is asked to have the model reason."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Ignored = None
    display: Literal["summarized"] | None = None


class OutputFormat(Closed, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Closed, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class KeepThinking(Closed, kw_only=True):
    """An edit that leaves a conversation as it is."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Closed, kw_only=True):
    edits: list[KeepThinking] | None = None


class CountedBody(Sampling, kw_only=True):
    """The fields that decide what the model reads."""

    messages: Annotated[list[Turn], SomeParts]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    betas: Ignored = None
    diagnostics: Ignored = None
    inference_geo: None = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None
    cache_control: Ignored = None


class MessagesBody(CountedBody, kw_only=True):
    max_tokens: Count
    stop_sequences: Annotated[list[Stop], Meta(max_length=16)] | None = None
