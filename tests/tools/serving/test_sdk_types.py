"""Each optional field of OpenAI's and Anthropic's own types is honoured, ignored by a list, or refused by name."""

import re
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

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
from openai.types.shared_params.response_format_json_schema import JSONSchema
from trt_spec.tools.serving import bodies, message_bodies, response_bodies
from typing_extensions import is_typeddict  # which knows those of typing_extensions, as the SDKs' are

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
    (chats.ChatCompletionAssistantMessageParam, {"role": "assistant"}, lambda it: chat(it, USER)),
    (chats.ChatCompletionContentPartTextParam, TEXT, lambda it: chat({"role": "user", "content": [it]})),
    (
        chats.ChatCompletionMessageFunctionToolCallParam,
        PAST,
        lambda it: chat({"role": "assistant", "tool_calls": [it]}, USER),
    ),
    (FunctionDefinition, FUNCTION, lambda it: chat(tools=[{"type": "function", "function": it}])),
    (
        JSONSchema,
        {"name": "n", "schema": {"type": "object"}},
        lambda it: chat(response_format={"type": "json_schema", "json_schema": it}),
    ),
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


def fields_of(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each field of an object, and whether it has to be there."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: (of, get_origin(of) is typing.Required or kind.__total__) for name, of in hints.items()}


def examples(kind: Any) -> list[Any]:
    """Values of a type: all of its alternatives, of an object what it has to have, of what is free two of them."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Annotated, typing.Required, typing.NotRequired):
        return examples(inside[0])
    if origin is Literal:
        return list(inside)
    if is_typeddict(kind):
        return [{name: examples(of)[0] for name, (of, needed) in fields_of(kind).items() if needed}]
    if inside and origin is dict:
        return [{}, {"a": examples(inside[1])[0]}]
    if isinstance(origin, type) and issubclass(origin, Iterable) and len(inside) == 1:
        return [[one] for one in examples(inside[0])]
    if inside:  # one of several
        return [value for one in inside if one is not type(None) for value in examples(one)]
    free = {str: ["a", "b"], int: [1, 2], float: [0.5, 0.75], bool: [True, False], object: [{}, {"a": 1}]}
    return free.get(kind, [{}, {"a": 1}] if kind in (dict, Any) else [[]])


def objects(kind: Any, around: Callable[[Any], Any] = lambda it: it) -> Iterator[tuple[Any, Callable[[Any], Any]]]:
    """The types of objects that a value may be or hold, each with what puts an object of it there."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in (Annotated, typing.Required, typing.NotRequired):
        yield from objects(inside[0], around)
    elif is_typeddict(kind):
        yield kind, around
    elif isinstance(origin, type) and issubclass(origin, Iterable) and origin is not dict and len(inside) == 1:
        yield from objects(inside[0], lambda it: around([it]))
    elif origin not in (Literal, dict):
        for one in inside:
            yield from objects(one, around)


class Seen:
    """What the core and the client see of a body."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.served, self._told = served, []
        for owner, name in (
            (served.service.stepper, "submit"),
            (served.service.template, "encode"),
            (served.service.kept_answers, "keep"),
        ):
            monkeypatch.setattr(owner, name, self._noting(name, getattr(owner, name)))

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*arguments: Any, **more: Any) -> Any:
            self._told.append(f"{name} {arguments} {more}" if name != "keep" else name)
            return call(*arguments, **more)

        return noting

    def of(self, path: str, body: dict) -> tuple[int, str, str]:
        """The status, what a refusal says, and all that can be seen, but for what is echoed or made up each time."""
        self._told.clear()
        answer = self.served.post(path, {"temperature": 0} | body)
        if answer.status_code != 200:
            return answer.status_code, answer.json()["error"]["message"], ""
        shown = answer.text
        if path == "/v1/responses" and not body.get("stream"):
            shown = str({name: answer.json()[name] for name in ("output", "usage")})
        shown = re.sub(r"""["'](id|created|created_at|cached_tokens)["']: ?("[^"]*"|'[^']*'|\d+)""", "", shown)
        return 200, "", "\n".join([*self._told, re.sub(r"0x[0-9a-f]+", "", shown)])


APIS = {  # as the page calls them
    "/v1/completions": "chats",
    "/v1/chat/completions": "chats",
    "/v1/responses": "Responses",
    "/v1/messages": "Messages",
}
NOTHING = re.compile(  # what is as it is where nothing is said, and what only changes something beside other fields
    r"(^|\.)(best_of|modalities|background|truncation|allowed_callers|async|defer_loading|type|display|logit_bias"
    r"|tool_choice=(auto|none)|role=user|include=\['reasoning.encrypted_content'\]"
    r"|parallel_tool_calls|include_obfuscation)$"
)


def page_lists(where: str) -> set[str]:
    """The fields of which the page says that they have no effect there."""
    [line] = re.findall(rf"\| (.*) \| accepted without effect in {where}\b", README.read_text(encoding="utf-8"))
    return set(re.findall(r"`(\w+)`", line))


NAMED_BY_THE_SERVER = ("model", "messages", "input", "prompt")  # what a body cannot be without


def unseen(seen: Seen, kind: Any, whole: dict, put: Put, within: str = "") -> Iterator[str]:
    """The fields of an object, and of objects in it, that are taken and change nothing; others are seen or refused."""
    _, _, base = seen.of(*put(whole))
    for name, (of, needed) in fields_of(kind).items():
        if name in NAMED_BY_THE_SERVER and not within:
            continue
        place, found = f"{within}{name}", {}
        for value in examples(of):
            status, said, shown = seen.of(*put(whole | {name: value}))
            assert status in (200, 400), (place, value, said)
            if status == 200:
                found[str(value)] = shown
            else:
                tag = value.get("type", name) if isinstance(value, dict) else name
                assert name in said or str(tag) in said, (place, value, said)
        inner = list(objects(of))
        if not inner and len(set(found.values()) | (set() if needed else {base})) == 1 and len(found) > needed:
            yield place
        elif "Literal" in str(of) and not needed:
            yield from (f"{place}={value}" for value, shown in found.items() if shown == base and "{" not in value)
        for one, around in inner:
            [least] = examples(one)

            def put_inside(it: Any, name: str = name, around: Callable = around) -> tuple[str, dict]:
                return put(whole | {name: around(it)})

            if seen.of(*put_inside(least))[0] == 200:
                yield from unseen(seen, one, least, put_inside, f"{place}.")


@pytest.mark.parametrize(("kind", "whole", "put"), PLACES, ids=lambda one: getattr(one, "__name__", ""))
def test_every_field_is_seen_or_refused_by_its_name_or_on_the_page(
    served: Served, monkeypatch: pytest.MonkeyPatch, kind: Any, whole: dict, put: Put
):
    seen = Seen(served, monkeypatch)
    status, said, _ = seen.of(*put(whole))
    assert status == 200, said
    path, _ = put(whole)
    listed = page_lists("every body") | page_lists(APIS[path])
    found = set(unseen(seen, kind, whole, put))
    assert {place for place in found if not (listed & set(place.split(".")) or NOTHING.search(place))} == set()


def structs(module: Any) -> Iterable[type[msgspec.Struct]]:
    for one in vars(module).values():
        if isinstance(one, type) and issubclass(one, msgspec.Struct) and one.__module__ == module.__name__:
            yield one


@pytest.mark.parametrize(
    ("where", "module"), [("chats", bodies), ("Responses", response_bodies), ("Messages", message_bodies)]
)
def test_the_page_lists_what_is_ignored(where: str, module: Any):
    common = {field.encode_name for field in msgspec.structs.fields(bodies.Sampling) if field.type == bodies.Ignored}
    found = {
        field.encode_name
        for kind in structs(module)
        for field in msgspec.structs.fields(kind)
        if field.type == bodies.Ignored
    }
    assert page_lists("every body") == common | {"metadata"}
    assert page_lists(where) == (found - common) | (set() if where == "Messages" else {"name", "description"})


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
        ("inference_geo", lambda: message(inference_geo="eu")),
        ("display", lambda: message(thinking={"type": "adaptive", "display": "omitted"})),
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
