"""A flag for every field of SamplingParams, made from the field itself, and the number types of other flags."""

import argparse
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, get_type_hints

from ...runtime import SamplingParams
from ...runtime.sampling.params import HELP

LARGEST_BATCH = 4096
MOST_DIGITS = 18  # of a number that still counts something


def add_sampling_flags(parser: argparse.ArgumentParser, only: Collection[str] = tuple(HELP)) -> None:
    """Absent flags leave no attribute, so that the dataclass keeps its defaults."""
    group = parser.add_argument_group("sampling")
    types = get_type_hints(SamplingParams)
    for field in fields(SamplingParams):
        if field.name in only:
            form = FORMS[types[field.name]]
            help_text = HELP[field.name] + ("; may be repeated" if form.get("action") == "append" else "")
            if isinstance(field.default, int | float | str) and form is not FORMS[bool]:
                help_text += f" (default {field.default})"
            group.add_argument(flag(field.name), default=argparse.SUPPRESS, help=help_text, **form)


def sampling_params(arguments: argparse.Namespace, **fixed: Any) -> SamplingParams:
    """The parameters whose flags were given, and those the command itself fixes."""
    names = {field.name for field in fields(SamplingParams)}
    given = {name: value for name, value in vars(arguments).items() if name in names}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    return SamplingParams(**given | fixed)


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def token_bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no ID=VALUE, expected for instance 42=-1.5") from None


def positive(text: str) -> int:
    if not (text.isdecimal() and len(text) <= MOST_DIGITS and int(text)):
        raise argparse.ArgumentTypeError(f"{text[:20]!r}, expected a whole number >= 1")
    return int(text)


def batch_size(text: str) -> int:
    """Of requests at once; a slip of the finger must not ask for all memory there is."""
    if positive(text) > LARGEST_BATCH:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}, expected a whole number from 1 to {LARGEST_BATCH}")
    return int(text)


FORMS: dict[Any, dict[str, Any]] = {
    bool: {"action": "store_true"},
    int: {"type": int, "metavar": "N"},
    int | None: {"type": int, "metavar": "N"},
    float: {"type": float, "metavar": "X"},
    float | None: {"type": float, "metavar": "X"},
    str: {"metavar": "NAME"},
    Sequence[str]: {"action": "append", "metavar": "TEXT"},
    Sequence[int]: {"action": "append", "type": int, "metavar": "ID"},
    Mapping[int, float]: {"action": "append", "type": token_bias, "metavar": "ID=VALUE"},
}
