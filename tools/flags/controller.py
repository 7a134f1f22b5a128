"""How a request's draft length is chosen: a number, by measured costs, or by the draft's entropy."""

import argparse
from typing import Any

from ...engines import RequestError
from ...runtime import EntropyRule
from ...runtime.drafters import DRAFTERS, NONE
from ...runtime.lengths.drafting import AUTO, DEFAULT_DRAFT_LENGTH, MIXED, DraftLength
from ...runtime.lengths.entropy import HELP
from .sampling import FORMS, flag

CONTROLLERS = ("costs", "entropy")


def add_controller_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--draft-length",
        type=_draft_length,
        metavar="K|auto",
        help="proposals a round, 0 decodes plainly, auto chooses for each round (default auto once trt-spec tune has "
        f"measured what rounds cost here, else {DEFAULT_DRAFT_LENGTH} or what plans were compiled for)",
    )
    parser.add_argument(
        "--drafter",
        metavar="|".join((*DRAFTERS, NONE, MIXED)),
        help="where proposals come from (default: the draft model if any); mixed chooses for each round",
    )
    parser.add_argument("--controller", choices=CONTROLLERS, help="what auto chooses by (default costs)")
    group = parser.add_argument_group("--controller entropy")
    for name, text in HELP.items():
        default = getattr(EntropyRule(), name)
        form = FORMS[type(default)]
        group.add_argument(flag(name), help=f"{text} (default {default})", **form)


def draft_length(arguments: argparse.Namespace) -> DraftLength | None:
    given: dict[str, Any] = {name: value for name in HELP if (value := getattr(arguments, name)) is not None}
    if arguments.controller is None and not given:
        asked: DraftLength | None = arguments.draft_length
        return asked
    if arguments.draft_length not in (None, AUTO):
        raise RequestError(f"--draft-length {arguments.draft_length} leaves a controller nothing to choose; say auto")
    if arguments.controller == "entropy":
        return EntropyRule(**given)
    if given:
        raise RequestError(f"{flag(next(iter(given)))} belongs to --controller entropy; add that")
    return AUTO


def _draft_length(text: str) -> int | str:
    if text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}, expected auto or a whole number") from None
