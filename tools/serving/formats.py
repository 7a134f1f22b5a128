"""Turn every way in which clients ask for the form of a text into one grammar."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from ...engines import RequestError
from ...runtime import Grammar
from .bodies import Sampling, StructuredOutputs
from .tool_calls import Toolbox


class RequestedGrammar(NamedTuple):
    """A grammar and the field that asks for it."""

    field: str
    grammar: Grammar


def format_of(body: Sampling, tools: Toolbox | None = None) -> RequestedGrammar | None:
    """Return the one grammar that a body asks for: what it has to be, or calls that may be made instead.

    Where a call is required no text is left for `response_format`.
    """
    required = tools is not None and tools.required
    asked = [one for one in _formats(body) if not (required and one.field == "response_format")]
    fields = [*(one.field for one in asked), *(["tool_choice"] if required else ())]
    if len(fields) > 1:
        raise RequestError(f"{fields[0]} and {fields[1]} both say what the answer is; send one", fields[0])
    answer = asked[0].grammar if asked else None
    grammar = answer if tools is None else tools.grammar(answer)
    return None if grammar is None else RequestedGrammar(fields[0] if fields else "tool_choice", grammar)


def _formats(body: Sampling) -> Iterator[RequestedGrammar]:
    makers: dict[str, Any] = {
        "response_format": Grammar.from_response_format,
        "structured_outputs": _structured,
        "grammar": Grammar.gbnf,
        "json_schema": Grammar.json_schema,
        "bad_words": Grammar.without,
    }
    for field, make in makers.items():
        if (value := getattr(body, field, None)) is not None and (grammar := _made(field, make, value)) is not None:
            yield RequestedGrammar(field, grammar)


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
