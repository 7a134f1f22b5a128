"""The answers to clients, in the shapes of OpenAI's API; a field that is UNSET is left out."""

import time
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls"] | None


class PromptDetails(Struct):
    cached_tokens: int  # which an earlier request had left


class CompletionDetails(Struct):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET  # where an output was predicted


class TopLogprob(Struct, gc=False):  # no garbage is looked for in these: an answer may have a hundred thousand
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, gc=False):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class AnyChoice(Struct, kw_only=True):
    """The fields that the choices of all kinds of answers have."""

    index: int
    finish_reason: FinishReason = None
    stop_reason: str | int | UnsetType | None = UNSET  # the stop string or token that has ended it
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    speculation: dict[str, Any] | UnsetType = UNSET


class CompletionChoice(AnyChoice, kw_only=True):
    text: str
    logprobs: CompletionLogprobs | None = None


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCall(Struct):
    id: str
    function: FunctionDelta
    type: Literal["function"] = "function"


class CallDelta(Struct):
    """An addition to a call: its id and name first, then its arguments."""

    function: FunctionDelta
    index: int = 0
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatMessage(Struct):
    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class Delta(Struct):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET


class ChatChoice(AnyChoice, kw_only=True):
    message: ChatMessage
    logprobs: ChatLogprobs | None = None


class ChunkChoice(AnyChoice, kw_only=True):
    delta: Delta
    logprobs: ChatLogprobs | None = None


AChoice = TypeVar("AChoice", bound=AnyChoice)


class Answer(Struct, Generic[AChoice], kw_only=True):
    """A whole answer, or a chunk of one."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[AChoice]
    usage: Usage | UnsetType | None = UNSET
    obfuscation: str | UnsetType = UNSET


class ModelCard(Struct):
    id: str
    created: int
    max_model_len: int
    object: Literal["model"] = "model"
    owned_by: str = "trt-spec"
    parent: str | None = None  # of an adapter, the model that it adapts


class ModelList(Struct):
    data: list[ModelCard]
    object: Literal["list"] = "list"


class InputTokens(msgspec.Struct):
    """How many tokens a model would read."""

    input_tokens: int


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | UnsetType = UNSET


class Prompt(Struct):
    prompt: str


class Version(Struct):
    version: str


class Status(Struct):
    status: str


class Head(Struct):
    """The beginning that all chunks of one answer have in common."""

    id: str
    kind: str  # object, as the API calls it
    model: str
    fingerprint: str
    created: int = msgspec.field(default_factory=lambda: int(time.time()))

    def answer(self, choices: list[AChoice], usage: Usage | UnsetType | None = UNSET) -> Answer[AChoice]:
        return Answer(
            id=self.id,
            object=self.kind,
            created=self.created,
            model=self.model,
            system_fingerprint=self.fingerprint,
            choices=choices,
            usage=usage,
        )
