"""What the text of an answer has to be: every way in which clients ask for it becomes one grammar."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from ...engines import RequestError
from ...runtime import Grammar
from .bodies import Sampling, StructuredOutputs
from .tool_calls import Toolbox


class Asked(NamedTuple):
    """A grammar and the field that asks for it."""

    field: str
    grammar: Grammar


def format_of(body: Sampling, tools: Toolbox | None = None) -> Asked | None:
    """Return the one grammar that a body asks for. Where a call is required no text is left for `response_format`."""
    asked = list(_formats(body, tools))
    if tools is not None and tools.required:
        asked = [one for one in asked if one.field != "response_format"]
    if len(asked) > 1:
        first, second = asked[0].field, asked[1].field
        raise RequestError(f"{first} and {second} both say what the answer is; send one", first)
    return asked[0] if asked else None


def _formats(body: Sampling, tools: Toolbox | None) -> Iterator[Asked]:
    makers: dict[str, Any] = {
        "response_format": Grammar.from_response_format,
        "structured_outputs": _structured,
        "grammar": Grammar.gbnf,
        "json_schema": Grammar.json_schema,
        "bad_words": Grammar.without,
    }
    for field, make in makers.items():
        if (value := getattr(body, field, None)) is not None and (grammar := _made(field, make, value)) is not None:
            yield Asked(field, grammar)
    if tools is not None and (grammar := tools.grammar) is not None:
        yield Asked("tool_choice", grammar)


def _structured(outputs: StructuredOutputs) -> Grammar:
    makers: dict[str, Any] = {
        "json": Grammar.json_schema,
        "json_object": lambda _: Grammar.json_object(),
        "regex": Grammar.regex,
        "choice": Grammar.choice,
        "grammar": Grammar.gbnf,
    }
    given = {name: value for name in makers if (value := getattr(outputs, name)) is not None}
    if len(given) != 1:
        raise RequestError(f"structured_outputs has {len(given)} of {', '.join(makers)}, expected one")
    [(name, value)] = given.items()
    grammar: Grammar = makers[name](value)
    return grammar


def _made(field: str, make: Any, value: Any) -> Grammar | None:
    try:
        made: Grammar | None = make(value)
        return made
    except RequestError as error:
        raise RequestError(str(error), field) from error
