"""The bodies that clients may send: each field by name and type. Any other field is refused by its name."""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from ...runtime.state.asked import AUTO
from ...runtime.state.shapes import FORMS
from .errors import ApiError
from .expected import choices

LATER = {  # fields of OpenAI's API that are refused, each with the reason
    "functions": "functions are not supported",
    "function_call": "functions are not supported",
    "best_of": "only n completions are made, and all are returned",
    "defer_loading": "a model is shown all of its tools at once",
    "suffix": "text can only be continued, not filled in",
    "audio": "the model reads and writes text",
    "verbosity": "say in the prompt how long the answer should be",
    "web_search_options": "nothing is searched for",
    "moderation": "nothing is moderated",
    "chat_template": "the chat template is the bundle's own",
    "previous_response_id": "input holds the whole conversation",
    "conversation": "input holds the whole conversation",
    "background": "an answer is made while its client waits",
    "max_tool_calls": "tools are called by the client",
    "context_management": "what does not fit is refused; shorten the conversation",
    "mcp_servers": "tools are called by the client",
    "container": "nothing is run here",
    "inference_geo": "the server runs where it is",
    "display": "reasoning is shown as it is",
}
WHERE = re.compile(r" - at `\$\.?(.*)`$")
UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`")

# What clients send back or say of their own accounts, and what changes no token here. The README lists these fields.
Ignored = Annotated[Any, Meta(description="Accepted without effect.")]
Stop = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1)]
MOST_PARTS = 10_000  # of a conversation: messages, parts of one, calls
SomeParts = Meta(min_length=1, max_length=MOST_PARTS)
Parts = Meta(max_length=MOST_PARTS)
MOST_TOOLS = 128
Settings = Annotated[dict[str, str | int | float | bool | None], Meta(max_length=128)]


class Closed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A body that holds no fields but its own."""


class StreamOptions(Closed, kw_only=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # usage in each chunk
    include_obfuscation: bool = False  # a text of random length in each chunk


class LoadAdapterBody(Closed, kw_only=True):
    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]
    lora_path: Annotated[str, Meta(min_length=1, max_length=4096)]


class UnloadAdapterBody(Closed, kw_only=True):
    lora_name: Annotated[str, Meta(min_length=1, max_length=256)]


class TextPart(Closed, kw_only=True, tag_field="type", tag="text"):
    text: str
    prompt_cache_breakpoint: Ignored = None


class ImageUrl(Closed, kw_only=True):
    url: Annotated[str, Meta(min_length=1)]
    detail: Ignored = None  # an image is read as the model's own processor reads it


class ImagePart(Closed, kw_only=True, tag_field="type", tag="image_url"):
    image_url: ImageUrl
    prompt_cache_breakpoint: Ignored = None


class Prediction(Closed, kw_only=True):
    """The expected answer, for instance the text that it edits."""

    type: Literal["content"]
    content: str | list[TextPart]


SHAPE = f"^({'|'.join((AUTO, *FORMS))})$"


class StructuredOutputs(Closed, kw_only=True):
    """The form that the output has to have; exactly one of these."""

    json: dict[str, Any] | str | None = None
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None


class Sampling(Closed, kw_only=True):
    """The fields that all APIs have in common. null means the same as leaving a field out."""

    model: str | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-1e6, le=1e6)]] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    prediction: Prediction | None = None

    # Beyond OpenAI.
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-3, le=1e3)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Meta(min_length=1)] | None = None
    num_beams: Annotated[int, Meta(ge=1)] | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    bad_words: Annotated[list[Stop], Meta(min_length=1, max_length=64)] | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31)] | None = None
    return_token_ids: bool | None = None
    draft_length: Annotated[int, Meta(ge=0)] | Annotated[str, Meta(pattern=SHAPE)] | None = None
    drafter: str | None = None
    rule: Literal["rejection", "tokenwise", "coupled"] | None = None
    speculation: bool | None = None
    cache_salt: str | None = None

    user: Ignored = None
    metadata: Annotated[dict[str, str], Meta(max_length=128)] | None = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None


class Generation(Sampling, kw_only=True):
    """The fields that completions and chats have in common."""

    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=16)] | None = None
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(Generation, kw_only=True):
    prompt: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=0)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Literal[1] | None = None
    source: str | Annotated[list[TokenId], Meta(min_length=1)] | None = None  # beyond OpenAI: what an encoder reads


class Function(Closed, kw_only=True, omit_defaults=True):
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: Ignored = None  # arguments always fit their schema


class Tool(Closed, kw_only=True):
    type: Literal["function"]
    function: Function


class NamedFunction(Closed, kw_only=True):
    name: str


class NamedTool(Closed, kw_only=True, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTools(Closed, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1, max_length=MOST_TOOLS)]


class SomeTools(Closed, kw_only=True, tag_field="type", tag="allowed_tools"):
    """Some of the tools may be called, though the model is shown all of them."""

    allowed_tools: AllowedTools


class CalledFunction(Closed, kw_only=True):
    name: str
    arguments: str


class PastCall(Closed, kw_only=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(Closed, kw_only=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart | ImagePart], Parts] | None = None
    tool_calls: Annotated[list[PastCall], Parts] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    is_error: bool | None = None  # of what a tool gave, for templates that tell it

    # Clients send back what they were answered, with all that was empty in it.
    annotations: Ignored = None
    audio: None = None
    function_call: None = None
    parsed: None = None


class ChatBody(Generation, kw_only=True):
    messages: Annotated[list[Message], SomeParts]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Annotated[list[Tool], Meta(min_length=1, max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | SomeTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: Settings | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


Body = TypeVar("Body", bound=Closed)


def read_body(raw: bytes, kind: type[Body]) -> Body:
    """Read a body, or refuse it with the path of the field at fault."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON ({error}); send one JSON object", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply; send what the API describes") from None


def converted(fields: dict[str, Any], kind: type[Body], within: str) -> Body:
    """Read a part of a body, or refuse it likewise."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _refusal(str(error), kind, within) from None


def _refusal(message: str, kind: type[Closed], within: str = "") -> ApiError:
    found = WHERE.search(message)
    inner = path = found[1] if found else ""
    path = f"{within}.{path}".rstrip(".") if within else path
    reason = message[: found.start()] if found else message
    if unknown := UNKNOWN.match(reason):
        field = unknown[1]
        param = f"{path}.{field}" if path else field
        if field in LATER:
            return ApiError(400, f"{param} is refused: {LATER[field]}; leave it out", param, "unsupported_parameter")
        return ApiError(400, f"{param} is not a field of this request; leave it out", param, "unknown_parameter")
    missing = re.match(r"Object missing required field `(.*)`", reason)
    if missing:
        param = f"{path}.{missing[1]}" if path else missing[1]
        return ApiError(400, f"{param} is missing; it is required", param, "missing_required_parameter")
    param = path or None
    field = path.rpartition(".")[2]
    if field in LATER:  # some values are accepted: those that ask for nothing
        return ApiError(400, f"{param} is refused: {LATER[field]}; leave it out", param, "unsupported_parameter")
    said = reason[:1].lower() + reason[1:]
    if said.startswith("invalid") and (allowed := choices(kind, inner)):
        said += f", expected {', '.join(allowed)}"
    return ApiError(400, f"{param or 'the body'} is refused: {said}", param, "invalid_value")
