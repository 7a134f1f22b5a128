"""A flag for every field of SamplingParams, made from the field itself; and types for flags that count things."""

import argparse
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from ...runtime.acceptance.parameter_fields import HELP, ParameterFields
from ...runtime.acceptance.ranges import refuse_out_of_range
from ...runtime.grammars.grammar import Grammar
from ..text_files import read_text
from .groups import ADVANCED, BASIC, SAMPLING, SPECULATION, group

if TYPE_CHECKING:
    from ...runtime import SamplingParams

LARGEST_BATCH = 4096
EARLY_STOPPING: dict[str, bool | str] = {"true": True, "false": False, "never": "never"}
MOST_DIGITS = 18  # of a count; int() refuses thousands of them with a traceback


def add_sampling_flags(parser: argparse.ArgumentParser, only: Collection[str] = tuple(HELP), **defaults: Any) -> None:
    """A flag that is absent leaves no attribute unless `defaults` has one, so that SamplingParams keeps its own."""
    types = get_type_hints(ParameterFields)
    for field in fields(ParameterFields):
        if field.name in only:
            form = FORMS[types[field.name]]
            help_text = HELP[field.name] + ("; may be repeated" if form.get("action") == "append" else "")
            usual = defaults.get(field.name, field.default)
            if isinstance(usual, int | float | str) and form is not FORMS[bool]:
                help_text += f" (default {usual})"
            default = defaults.get(field.name, argparse.SUPPRESS)
            place = group(parser, PLACES.get(field.name, SAMPLING))
            place.add_argument(flag(field.name), default=default, help=help_text, **form)
    if "grammar" in only:
        for name, of, form in ALSO_GRAMMAR:
            group(parser, SAMPLING).add_argument(name, dest="grammar", default=argparse.SUPPRESS, help=of, **form)


PLACES = {  # of flags whose heading is not sampling
    "max_new_tokens": BASIC,
    "rule": SPECULATION,
    "draft_temperature": SPECULATION,
    "lenience": SPECULATION,
    "logprobs": ADVANCED,
    "prompt_logprobs": ADVANCED,
    "num_beams": ADVANCED,
    "length_penalty": ADVANCED,
    "early_stopping": ADVANCED,
    "num_return_sequences": ADVANCED,
    "show_special_tokens": ADVANCED,
    "extra": ADVANCED,
}


def sampling_params(arguments: argparse.Namespace, **fixed: Any) -> "SamplingParams":
    """SamplingParams from the flags that were given and from what the command itself fixes."""
    given_fields(arguments, **fixed)  # before torch is loaded
    from ...runtime import SamplingParams

    return SamplingParams(**_given(arguments) | fixed)


def given_fields(arguments: argparse.Namespace, **fixed: Any) -> ParameterFields:
    """Return them without torch, and refuse what no bundle could make sense of."""
    fields = ParameterFields(**_given(arguments) | fixed)
    refuse_out_of_range(fields)
    return fields


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    names = {field.name for field in fields(ParameterFields)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    for name in ("logit_bias", "extra"):
        if name in given:
            given[name] = dict(given[name])
    return given


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def token_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID=VALUE, expected for instance 42=-1.5") from None


def named_value(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, expected for instance reach=1.5")
    try:
        return name, json.loads(value)
    except (ValueError, RecursionError):
        return name, value


def early(text: str) -> bool | str:
    if text not in EARLY_STOPPING:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}, expected {', '.join(EARLY_STOPPING)}")
    return EARLY_STOPPING[text]


def positive(text: str) -> int:
    if not (text.isdecimal() and len(text) <= MOST_DIGITS and int(text)):
        raise argparse.ArgumentTypeError(f"{text[:20]!r}, expected a whole number >= 1")
    return int(text)


def add_number(
    parser: argparse._ActionsContainer,
    name: str,
    default: float,
    meaning: str,
    kind: Callable[[str], float] = positive,
    letter: str = "N",
) -> None:
    """A flag whose help names its default."""
    usual = f"{default:g}" if isinstance(default, float) else default
    parser.add_argument(name, type=kind, default=default, metavar=letter, help=f"{meaning} (default {usual})")


def batch_size(text: str) -> int:
    """Requests to decode together; the limit keeps a slip of the finger from asking for all memory there is."""
    if positive(text) > LARGEST_BATCH:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}, expected a whole number from 1 to {LARGEST_BATCH}")
    return int(text)


def schema_of(path: str) -> Grammar:
    return Grammar.json_schema(read_text(Path(path), "schema"))


def lark_of(path: str) -> Grammar:
    return Grammar.lark(read_text(Path(path), "grammar"))


ALSO_GRAMMAR: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("--json-schema", "let the output be JSON under the schema in this file", {"type": schema_of, "metavar": "FILE"}),
    ("--regex", "let the output be text that this matches as a whole", {"type": Grammar.regex, "metavar": "R"}),
)

FORMS: dict[Any, dict[str, Any]] = {
    bool: {"action": "store_true"},
    int: {"type": int, "metavar": "N"},
    int | None: {"type": int, "metavar": "N"},
    float: {"type": float, "metavar": "X"},
    float | None: {"type": float, "metavar": "X"},
    bool | str: {"type": early, "metavar": "WHEN"},
    str: {"metavar": "NAME"},
    Sequence[str]: {"action": "append", "metavar": "TEXT"},
    Sequence[int]: {"action": "append", "type": int, "metavar": "ID"},
    Mapping[int, float]: {"action": "append", "type": token_bias, "metavar": "ID=VALUE"},
    Grammar | None: {"type": lark_of, "metavar": "FILE"},
    Mapping[str, Any]: {"action": "append", "type": named_value, "metavar": "NAME=VALUE"},
}
