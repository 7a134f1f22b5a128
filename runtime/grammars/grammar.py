"""Languages that a request may restrict its output to: JSON under a schema, a regex, a Lark grammar, or a choice."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from ...engines import RequestError
from .with_llguidance import INNER, bounded, one_of

KINDS = {
    "json_schema": "a JSON schema",
    "regex": "a regular expression, which the whole output matches",
    "lark": "a Lark grammar, as llguidance reads it",
    "gbnf": "a grammar in GBNF, as llama.cpp reads it, or in Lark",
    "choice": "a JSON list of strings, one of which is the output",
    "around": "rules in Lark around another grammar: a JSON list of them, its kind and its text",
}
NAMES = {"json_schema": "JSON schema", "regex": "regular expression"}  # where users call them no grammars
ANY_TEXT = r"/(.|\n)*/"
LONGEST = 2**18  # characters: what is longer may take more than a second to compile


@dataclass(frozen=True)
class Grammar:
    """A language that an output has to belong to; `text` describes it as its `kind` says."""

    kind: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(f"the grammar's kind is {self.kind!r}, expected one of {', '.join(KINDS)}")
        if not isinstance(self.text, str):
            raise RequestError(f"the grammar's text is {self.text!r}, expected {KINDS[self.kind]}, as a string")
        if len(self.text) > LONGEST:
            raise RequestError(
                f"the grammar has {len(self.text):,} characters, expected at most {LONGEST:,}; shorten it"
            )
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the grammar is not valid Unicode ({error}); clean it first") from error
        if self.kind in ("json_schema", "choice", "around"):
            value = read_json(self.text, NAMES.get(self.kind, "grammar"))
            if self.kind == "choice" and not _strings(value):
                raise RequestError(f"the choice is {self.text[:80]!r}, expected {KINDS['choice']}, at least one")

    @classmethod
    def json_schema(cls, schema: Any) -> Self:
        """Allow any JSON value that fits a schema; the schema is an object, or its text."""
        return cls("json_schema", schema if isinstance(schema, str) else write_json(schema))

    @classmethod
    def json_object(cls) -> Self:
        """Allow any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Self:
        return cls("regex", pattern)

    @classmethod
    def lark(cls, text: str) -> Self:
        return cls("lark", text)

    @classmethod
    def gbnf(cls, text: str) -> Self:
        return cls("gbnf", text)

    @classmethod
    def choice(cls, strings: Sequence[str]) -> Self:
        return cls("choice", write_json(list(strings)))

    @classmethod
    def without(cls, words: Sequence[str]) -> Self:
        """Allow any text in which none of these occur."""
        _require_words(words)
        return cls.lark(f"start: TEXT\nTEXT: {ANY_TEXT} & ~/(.|\\n)*({one_of(words)})(.|\\n)*/")

    def after_reasoning(self, marks: tuple[str, str], begun: bool) -> Self:
        """Let the output be free between two marks, and bound by this grammar after them.

        The first mark is in the prompt if the reasoning has `begun` there; else there need be none.
        """
        before, after = map(write_json, marks)
        reasoning = r"reasoning /[ \n]{0,4}/"
        start = reasoning if begun else f"({before} {reasoning})?"
        return self._within(f"start: {start} {INNER}\nreasoning[suffix={after}]: {ANY_TEXT}")

    def _within(self, rules: str) -> Self:
        return type(self)("around", write_json([rules, self.kind, self.text]))

    @classmethod
    def from_response_format(cls, response_format: Any) -> Self | None:
        """Return what OpenAI's `response_format` asks for; None for plain text."""
        fields = _fields("response_format", response_format)
        match fields.get("type"):
            case "text":
                _require_known("response_format", fields, "type")
                return None
            case "json_object":
                _require_known("response_format", fields, "type", "schema")
                if fields.get("schema") is None:
                    return cls.json_object()
                return cls.json_schema(_fields("response_format.schema", fields["schema"]))
            case "json_schema":
                _require_known("response_format", fields, "type", "json_schema")
                own = _fields("json_schema", fields.get("json_schema"))
                _require_known("json_schema", own, "name", "description", "schema", "strict")
                return cls.json_schema(_fields("json_schema.schema", own.get("schema")))
        raise RequestError(
            f"response_format's type is {fields.get('type')!r}, expected text, json_object or json_schema"
        )

    @classmethod
    def from_tools(
        cls,
        tools: Any,
        tool_choice: Any = "auto",
        marks: tuple[str, str] | None = None,
        several: bool = True,
        answer: Self | None = None,
    ) -> Self | None:
        """Return what OpenAI's `tools` and `tool_choice` ask for: {"name": …, "arguments": …} of one of the tools.

        `marks` are the lines before and after a call if the model marks it so. It then makes one call or, if it may,
        `several`. With auto it may answer instead: in text, or in what the grammar `answer` allows. None if the output
        is free: with none, and with auto without marks.
        """
        if not isinstance(tools, list):
            raise RequestError(f"tools is {tools!r}, expected a list of functions")
        functions = [_fields("a tool's function", _fields("a tool", tool).get("function")) for tool in tools]
        names = [one.get("name") for one in functions]
        if not all(isinstance(name, str) and name for name in names):
            raise RequestError(f"the tools' names are {names!r}, expected texts that are not empty")
        schemas = [_fields("a tool's parameters", one.get("parameters", {"type": "object"})) for one in functions]
        parameters = {str(name): schema for name, schema in zip(names, schemas, strict=True)}
        free = tool_choice in (None, "auto")
        if tool_choice == "none" or (free and marks is None):
            return None
        if not free and tool_choice != "required":
            name = _fields("tool_choice.function", _fields("tool_choice", tool_choice).get("function")).get("name")
            if name not in names:
                raise RequestError(f"tool_choice names {name!r}, expected one of the tools {names}")
            parameters = {str(name): parameters[str(name)]}
        if not parameters:
            raise RequestError("tool_choice is 'required', but there are no tools; give one")
        rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(parameters)))}"]
        if marks is None:
            rules.append("start: call")
        else:
            before, after = map(write_json, marks)
            in_text = free and answer is None  # calls are between any text
            rules.append(rf'marked: {"to_call" if in_text else before} "\n" call "\n" {after}')
            if in_text:
                rules.append(f"start: {'marked* TEXT' if several else 'marked | TEXT'}")
                rules += [f"to_call[suffix={before}]: {ANY_TEXT}", f"TEXT: {ANY_TEXT}"]
            else:
                calls = r'marked ("\n" marked)*' if several else "marked"
                rules.append(f"start: {calls} | {INNER}" if free else f"start: {calls}")
        for i, (name, schema) in enumerate(parameters.items()):  # each schema is a root of its own, as its $refs expect
            opening = write_json(cls.opening_of_call(name))
            rules += [f'call_{i}: {opening} arguments_{i} "}}"', f"arguments_{i}: %json {write_json(bounded(schema))}"]
        text = "\n".join(rules)
        return cls.lark(text) if answer is None or not free else answer._within(text)

    @staticmethod
    def opening_of_call(name: str) -> str:
        """Return the beginning of a call under `from_tools`; its arguments and a brace follow."""
        return f'{{"name": {write_json(name)}, "arguments": '


def read_json(text: str, name: str = "grammar") -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the {name} is not JSON ({error}); mend its text") from error


def write_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"the grammar cannot be written as JSON ({error}); use plain JSON values") from error


def _fields(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} is {value!r}, expected an object")
    return value


def _require_known(name: str, fields: dict[str, Any], *known: str) -> None:
    """Refuse what would be dropped in silence."""
    for field in fields:
        if field not in known:
            raise RequestError(f"{name} has the field {field!r}, expected {', '.join(known)}; leave it out")


def _require_words(words: Sequence[str]) -> None:
    if not _strings(list(words)) or not all(words):
        raise RequestError(f"the words to leave out are {words!r}, expected texts that are not empty")


def _strings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)
