"""A grammar says what it is, or is refused where it is made."""

import re
from dataclasses import FrozenInstanceError

import pytest
from tokenizers import Tokenizer
from trt_spec.runtime import Grammar, RequestError, SamplingParams

from .vocabularies import DEMO


def test_each_kind_is_made_from_what_users_have():
    assert (
        Grammar.json_schema({"type": "object"}) == Grammar.json_object() == Grammar("json_schema", '{"type": "object"}')
    )
    assert Grammar.json_schema('{"type": "object"}') == Grammar.json_object()
    assert Grammar.choice(["é", "b"]) == Grammar("choice", '["é", "b"]')
    assert Grammar.regex("a") == Grammar("regex", "a")
    assert Grammar.lark('start: "a"') == Grammar("lark", 'start: "a"')


def test_a_grammar_cannot_change():
    with pytest.raises(FrozenInstanceError):
        Grammar.regex("a").text = "b"


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("ebnf", "a", "the grammar's kind is 'ebnf', expected one of json_schema, regex, lark, gbnf, choice, around"),
        ("regex", 5, "the grammar's text is 5, expected a regular expression, which the whole output matches, as a "),
        ("regex", "a" * 300_000, "the grammar has 300,000 characters, expected at most 262,144; shorten it"),
        ("regex", "\ud800", "the grammar is not valid Unicode"),
        ("json_schema", '{"type":', "the JSON schema is not JSON (Expecting value"),
        ("json_schema", "[" * 100_000, "the JSON schema is not JSON ("),
        (
            "choice",
            "[]",
            "the choice is '[]', expected a JSON list of strings, one of which is the output, at least one",
        ),
        ("choice", '["a", 1]', "the choice is "),
    ],
)
def test_what_is_no_grammar_is_refused(kind, text, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        Grammar(kind, text)


def test_what_cannot_be_json_is_refused():
    with pytest.raises(RequestError, match="the grammar cannot be written as JSON"):
        Grammar.json_schema({"a": {1, 2}})


def test_params_take_a_grammar_and_nothing_that_looks_like_one():
    with pytest.raises(RequestError, match="grammar is 'a', expected a Grammar"):
        SamplingParams(grammar="a")


def test_to_ignore_the_end_of_what_has_one_is_refused():
    message = "ignore_eos is set, but only the end of the sequence can follow what completes a grammar; leave one out"
    with pytest.raises(RequestError, match=message):
        SamplingParams(grammar=Grammar.regex("a"), ignore_eos=True)


SCHEMA = {"type": "object", "properties": {"n": {"$ref": "#/$defs/size"}}, "$defs": {"size": {"type": "integer"}}}
TOOLS = [
    {"type": "function", "function": {"name": "grow", "parameters": SCHEMA | {"required": ["n"]}}},
    {"type": "function", "function": {"name": 'say "é"', "parameters": {"properties": {"$defs": {}}}}},
    {"type": "function", "function": {"name": "stop"}},
]


@pytest.mark.parametrize(
    ("response_format", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, Grammar.json_object()),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}, SCHEMA),
    ],
)
def test_a_response_format_is_a_grammar(response_format, expected):
    expected = Grammar.json_schema(expected) if isinstance(expected, dict) else expected
    assert Grammar.from_response_format(response_format) == expected


STOP = '{"name": "stop", "arguments": {}}'
MARKED = f"<tool_call>\n{STOP}\n</tool_call>"
MARKS = {"marks": ("<tool_call>", "</tool_call>")}


@pytest.mark.parametrize(
    ("tool_choice", "more", "allowed", "refused"),
    [
        (
            "required",
            {},
            ['{"name": "grow", "arguments": {"n": 5}}', '{"name": "say \\"é\\"", "arguments": {}}'],
            ['{"name": "shrink"', '{"name": "grow", "arguments": {}', "hello"],
        ),
        (
            {"type": "function", "function": {"name": "stop"}},
            {},
            [STOP, '{"name": "stop", "arguments": {"any": 1}}'],
            ['{"name": "grow"'],
        ),
        ("required", MARKS, [MARKED], [STOP, "text", f"text {MARKED}"]),
        (
            "auto",
            MARKS,
            ["", "text, < and <tool", f"\n{MARKED}", f"{MARKED} and {MARKED}\ntext"],
            ["<tool_call>", f"<tool_call>{STOP}", '<tool_call>\n{"name": "shrink"', f"{MARKED} <tool_call>\n"],
        ),
        (
            "auto",
            MARKS | {"several": False},
            ["text", MARKED, f"text {MARKED}"],
            [f"{MARKED}{MARKED}", f"{MARKED} text"],
        ),
    ],
)
def test_tools_are_a_grammar_of_their_calls(compiler, tool_choice, more, allowed, refused):
    grammar = Grammar.from_tools(TOOLS, tool_choice, **more)
    tokenizer = Tokenizer.from_file(str(DEMO.tokenizer_file))
    for text in (*allowed, *refused):
        guide = compiler.guide(SamplingParams(grammar=grammar))
        tokens = [*tokenizer.encode(text, add_special_tokens=False).ids, *DEMO.tokenizer.eos_token_ids]
        assert (guide.follow(tokens) == len(tokens)) == (text in allowed), (text, guide.error)


@pytest.mark.parametrize("tool_choice", [None, "none", "auto"])
def test_tools_that_need_not_be_called_ask_for_no_grammar(tool_choice):
    assert Grammar.from_tools(TOOLS, tool_choice) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.from_response_format("json"), "response_format is 'json', expected an object"),
        (
            lambda: Grammar.from_response_format({"type": "xml"}),
            "response_format's type is 'xml', expected text, json_",
        ),
        (lambda: Grammar.from_response_format({"type": "json_schema"}), "json_schema is None, expected an object"),
        (
            lambda: Grammar.from_response_format({"type": "json_schema", "json_schema": {"schema": 1}}),
            "json_schema.schema is 1, expected an object",
        ),
        (lambda: Grammar.from_tools({}, "required"), "tools is {}, expected a list of functions"),
        (lambda: Grammar.from_tools([{}], "required"), "a tool's function is None, expected an object"),
        (lambda: Grammar.from_tools([{"function": {}}]), "the tools' names are [None], expected texts that are not"),
        (lambda: Grammar.from_tools([{"function": {"name": []}}]), "the tools' names are [[]], expected texts that "),
        (
            lambda: Grammar.from_tools([{"function": {"name": "a", "parameters": []}}]),
            "a tool's parameters is [], expected an object",
        ),
        (lambda: Grammar.from_tools(TOOLS, {"function": "a"}), "tool_choice.function is 'a', expected an object"),
        (lambda: Grammar.from_tools([], "required"), "tool_choice is 'required', but there are no tools; give one"),
        (lambda: Grammar.from_tools(TOOLS, "always"), "tool_choice is 'always', expected an object"),
        (
            lambda: Grammar.from_tools(TOOLS, {"function": {"name": "fly"}}),
            "tool_choice names 'fly', expected one of the tools ['grow', ",
        ),
    ],
)
def test_what_openai_would_refuse_is_refused(make, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        make()
