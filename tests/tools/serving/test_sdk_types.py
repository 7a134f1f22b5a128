"""Each optional field of OpenAI's and Anthropic's own types is honoured, ignored by a list, or refused by name."""

import re
import typing
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints, is_typeddict

import anthropic.types as anthropic
import anthropic.types.beta as beta
import msgspec
import openai.types.chat as chats
import openai.types.responses as responses
import pytest
from anthropic.types.beta.message_create_params import MessageCreateParamsBase as BetaMessage
from anthropic.types.message_create_params import MessageCreateParamsBase as Message
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
from openai.types.completion_create_params import CompletionCreateParamsBase as Completion
from openai.types.responses.response_create_params import ResponseCreateParamsBase as Response
from openai.types.responses.response_input_param import FunctionCallOutput
from openai.types.shared_params import FunctionDefinition
from trt_spec.tools.serving import bodies, messages, response_bodies

from .conftest import Served

README = Path(__file__).parents[3] / "tools" / "serving" / "README.md"
USER = {"role": "user", "content": "abc"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "1"}
THOUGHT = {"type": "reasoning", "id": "r", "summary": []}
OUTPUT = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]}
FLAT = {"type": "function", "name": "f", "parameters": {"type": "object"}}
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
PAST = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
GAVE = {"type": "tool_result", "tool_use_id": "c", "content": "1"}
TEXT = {"type": "text", "text": "a"}
THINKING = {"type": "thinking", "thinking": "a", "signature": "s"}
TOOL = {"name": "f", "input_schema": {"type": "object"}}


def chat(*said: dict, **fields: object) -> tuple[str, dict]:
    return "/v1/chat/completions", {"max_tokens": 1, "messages": [USER, *said]} | fields


def respond(*items: dict, **fields: object) -> tuple[str, dict]:
    return "/v1/responses", {"max_output_tokens": 1, "input": [USER, *items]} | fields


def message(*said: dict, **fields: object) -> tuple[str, dict]:
    return "/v1/messages", {"max_tokens": 1, "messages": [USER, *said]} | fields


def assistant(*blocks: dict) -> dict:
    return {"role": "assistant", "content": list(blocks)}


def given(*blocks: dict) -> dict:
    return {"role": "user", "content": list(blocks)}


Put = Callable[[dict], tuple[str, dict]]
PLACES: list[tuple[Any, dict, Put]] = [  # a type, an object of it, and the body that holds it
    (Completion, {}, lambda it: ("/v1/completions", {"prompt": "abc", "max_tokens": 1} | it)),
    (Chat, {}, lambda it: chat(**it)),
    (chats.ChatCompletionUserMessageParam, USER, lambda it: chat(it)),
    (chats.ChatCompletionAssistantMessageParam, {"role": "assistant", "content": "a"}, lambda it: chat(it, USER)),
    (chats.ChatCompletionContentPartTextParam, TEXT, lambda it: chat({"role": "user", "content": [it]})),
    (
        chats.ChatCompletionMessageFunctionToolCallParam,
        PAST,
        lambda it: chat({"role": "assistant", "tool_calls": [it]}, USER),
    ),
    (FunctionDefinition, FUNCTION, lambda it: chat(tools=[{"type": "function", "function": it}])),
    (Response, {}, lambda it: respond(**it)),
    (responses.EasyInputMessageParam, USER, respond),
    (responses.ResponseOutputMessageParam, OUTPUT, lambda it: respond(it, USER)),
    (responses.ResponseFunctionToolCallParam, CALL, lambda it: respond(it, RESULT)),
    (FunctionCallOutput, RESULT, lambda it: respond(CALL, it)),
    (responses.ResponseReasoningItemParam, THOUGHT, lambda it: respond(it, OUTPUT, USER)),
    (responses.ResponseInputTextParam, {"type": "input_text", "text": "a"}, lambda it: respond(given(it))),
    (responses.FunctionToolParam, FLAT, lambda it: respond(tools=[it])),
    (Message, {}, lambda it: message(**it)),
    (BetaMessage, {}, lambda it: message(**it)),
]
for kinds in (anthropic, beta):
    of = "Beta" if kinds is beta else ""
    PLACES += [
        (getattr(kinds, f"{of}TextBlockParam"), TEXT, lambda it: message(given(it))),
        (getattr(kinds, f"{of}ToolUseBlockParam"), USE, lambda it: message(assistant(it), given(GAVE))),
        (getattr(kinds, f"{of}ToolResultBlockParam"), GAVE, lambda it: message(assistant(USE), given(it))),
        (getattr(kinds, f"{of}ThinkingBlockParam"), THINKING, lambda it: message(assistant(it, TEXT), USER)),
        (getattr(kinds, f"{of}ToolParam"), TOOL, lambda it: message(tools=[it])),
    ]


def example(kind: Any) -> Any:
    """A value of a type: of several the first that is not null, of an object what it has to have."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Annotated, typing.Required, typing.NotRequired):
        return example(inside[0])
    if origin is Literal:
        return inside[0]
    if is_typeddict(kind):
        return {name: example(one) for name, one in get_type_hints(kind).items() if name in kind.__required_keys__}
    if inside and origin is dict:
        return {}
    if isinstance(origin, type) and issubclass(origin, Iterable) and len(inside) == 1:
        return [example(inside[0])]
    if inside:  # one of several
        return example(next(one for one in inside if one is not type(None)))
    simple = {str: "a", int: 1, float: 1.0, bool: True, object: {}}
    return simple.get(kind, {} if kind in (dict, Any) else [])


@pytest.mark.parametrize(("kind", "whole", "put"), PLACES, ids=lambda one: getattr(one, "__name__", ""))
def test_every_optional_field_is_taken_or_refused_by_its_name(served: Served, kind: Any, whole: dict, put: Put):
    fields = {name: example(of) for name, of in get_type_hints(kind).items() if name not in whole}
    answer = served.post(*put(whole))
    assert answer.status_code == 200, answer.text
    for name, value in fields.items():
        if name in ("model", "stream", "messages", "input", "prompt"):
            continue
        answer = served.post(*put(whole | {name: value}))
        assert answer.status_code in (200, 400), (name, value, answer.text)
        assert answer.status_code == 200 or name in answer.json()["error"]["message"], (name, value, answer.text)


def structs(*modules: Any) -> Iterable[type[msgspec.Struct]]:
    for one in chain.from_iterable(vars(module).values() for module in modules):
        if isinstance(one, type) and issubclass(one, msgspec.Struct):
            yield one


def test_the_page_lists_what_is_ignored():
    found = {
        field.encode_name
        for kind in structs(bodies, messages, response_bodies)
        for field in msgspec.structs.fields(kind)
        if field.type == bodies.Ignored
    }
    [line] = re.findall(r"\| (.*) \| accepted, without effect \|", README.read_text(encoding="utf-8"))
    assert set(re.findall(r"`(\w+)`", line)) == found


ANSWERED: Sequence[tuple[str, dict, Put]] = [
    ("caller", {"type": "direct"}, lambda it: respond(CALL | it, RESULT)),
    ("async_", False, lambda it: respond(CALL | it, RESULT)),
    ("async", False, lambda it: respond(CALL | it, RESULT)),
    ("namespace", "n", lambda it: respond(CALL | it, RESULT)),
    ("toolset_name", "n", lambda it: message(assistant(USE | it), given(GAVE))),
    ("context_management", {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, lambda it: message(**it)),
    ("context_management", None, lambda it: message(**it)),
    ("defer_loading", False, lambda it: message(tools=[TOOL | it])),
    ("best_of", 1, lambda it: ("/v1/completions", {"prompt": "abc", "max_tokens": 1} | it)),
]


@pytest.mark.parametrize(("name", "value", "put"), ANSWERED)
def test_what_changes_no_token_is_taken(served: Served, name: str, value: object, put: Put):
    fields = {"temperature": 0}
    path, body = put({name: value})
    same = put({})[1]
    answer = served.post(path, body | fields)
    assert answer.status_code == 200, answer.text
    other = served.post(path, same | fields).json()
    for one in (found := answer.json()), other:
        for name in ("id", "created", "created_at", "usage", "output", "content"):
            one.pop(name, None)
    assert found == other


def test_reasoning_that_only_another_service_can_read_is_left_out(served: Served):
    hidden = {"type": "redacted_thinking", "data": "opaque"}
    counts = [
        served.post("/v1/messages/count_tokens", {"messages": [USER, assistant(*blocks, TEXT), USER]}).json()
        for blocks in ([], [hidden])
    ]
    assert counts[0] == counts[1]
    assert counts[0]["input_tokens"] > 0


@pytest.mark.parametrize(
    ("field", "put"),
    [
        ("defer_loading", lambda: message(tools=[TOOL | {"defer_loading": True}])),
        ("defer_loading", lambda: respond(tools=[FLAT | {"defer_loading": True}])),
        ("keep", lambda: message(context_management={"edits": [{"type": "clear_thinking_20251015", "keep": 1}]})),
        ("best_of", lambda: ("/v1/completions", {"prompt": "abc", "best_of": 2})),
        ("schema", lambda: chat(response_format={"type": "text", "schema": {"type": "object"}})),
        ("schema", lambda: respond(text={"format": {"type": "text", "schema": {"type": "object"}}})),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(served: Served, field: str, put: Callable[[], tuple]):
    answer = served.post(*put())
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]
