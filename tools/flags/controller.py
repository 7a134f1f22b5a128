"""Flags that say how the draft length is chosen: a number, by measured costs, or by the draft's entropy."""

import argparse
from typing import Any

from ...engines import MAX_DRAFT_LENGTH, Bundle, RequestError
from ...runtime.lengths.costs import read_costs, require_costs
from ...runtime.scheduling.engine_choice import resolve
from ...runtime.state.asked import (
    AUTO,
    BESIDE,
    DEFAULT_DRAFT_LENGTH,
    DRAFTER_NAMES,
    MIXED,
    NONE,
    DraftLength,
    EntropyRule,
    refuse_length_of_mixed,
)
from ...runtime.state.asked import ENTROPY_HELP as HELP
from ...runtime.state.needs import lack
from ...runtime.state.shapes import MOST_BRANCHES, read_shape, refuse_large
from .engine import engine_name
from .groups import ADVANCED, SPECULATION, group
from .sampling import FORMS, flag

SOURCES_HELP = (
    "where proposals come from (default: model if the bundle has a draft, else lookup). model: the draft model, the "
    "first if the bundle has several; model2 and so on: the others; common, text: a draft with other tokens, by those "
    "that the target has too, or by what it writes; lookup: what followed the same words earlier; suffix: longer "
    "matches, also in earlier outputs; ngram: the table of trt-spec ngram; cascade: the draft over what lookup finds; "
    "random: any token; mixed: chosen for each round. Several, as model+suffix, give a line each, verified "
    "together; suffix+suffix or lookup+lookup the best copy and the next best, and so on"
)
CONTROLLERS = ("costs", "entropy")


def add_controller_flags(parser: argparse.ArgumentParser) -> None:
    speculation = group(parser, SPECULATION)
    speculation.add_argument(
        "--draft-length",
        type=read_draft_length,
        metavar="K|K+M|K/N|AxBxC|auto",
        help="tokens to propose in each round; 0 decodes without a draft; K+M, like 5+3, puts M siblings beside a line "
        "of K; K/N, like 4/12, lets the draft grow a tree of N tokens, at most K deep; AxBxC, like 3x2x1, a tree with "
        "so many children of each node, level by level; auto chooses for each round (default: auto "
        f"once trt-spec tune has measured this machine, else {DEFAULT_DRAFT_LENGTH}, or less if plans are narrower)",
    )
    speculation.add_argument(
        "--drafter",
        metavar="NAME",
        help=f"{SOURCES_HELP}; none decodes without a draft. All: {' '.join((*DRAFTER_NAMES, NONE, MIXED))}",
    )
    advanced = group(parser, ADVANCED)
    advanced.add_argument(
        "--controller",
        choices=CONTROLLERS,
        help="how auto chooses: by measured costs, or by the draft's entropy (default costs)",
    )
    for name, text in HELP.items():
        default = getattr(EntropyRule(), name)
        form = FORMS[type(default)]
        advanced.add_argument(flag(name), help=f"--controller entropy: {text} (default {default})", **form)


def refuse_drafting(arguments: argparse.Namespace) -> None:
    """Refuse draft lengths and drafters that no bundle has."""
    length = draft_length(arguments)
    refuse_drafter(arguments.drafter)
    if searches(arguments):
        return
    if arguments.drafter == MIXED and length not in (None, AUTO):
        refuse_length_of_mixed(length)
    if isinstance(length, str) and (shape := read_shape(length)):
        refuse_large(shape, MAX_DRAFT_LENGTH, MAX_DRAFT_LENGTH + MOST_BRANCHES)


def searches(arguments: argparse.Namespace) -> bool:
    """Whether beams are asked for, which have drafts of their own kind."""
    return getattr(arguments, "num_beams", 1) > 1


def refuse_drafter(drafter: str | None) -> None:
    if drafter in (None, NONE, MIXED) or {*drafter.split(BESIDE)} <= {*DRAFTER_NAMES}:
        return
    listed = ", ".join((*DRAFTER_NAMES, NONE, MIXED))
    raise RequestError(f"--drafter is {drafter[:40]!r}, expected one of {listed}; or several, as model+suffix")


def refuse_lacking(bundle: Bundle, arguments: argparse.Namespace, length: DraftLength | None, batch: int) -> None:
    """Refuse a drafter that the bundle lacks, and auto where nobody has measured what rounds cost."""
    drafter = arguments.drafter
    for name in (drafter or "").split(BESIDE):
        if reason := lack(name, bundle):
            raise RequestError(reason, "drafter")
    if not searches(arguments) and (length == AUTO or (length is None and drafter == MIXED)):
        engine = resolve(bundle, engine_name(arguments), arguments.device, batch)
        require_costs(read_costs(bundle, engine, arguments.device), drafter)


def draft_length(arguments: argparse.Namespace) -> DraftLength | None:
    asked: DraftLength | None = arguments.draft_length
    if type(asked) is int and not 0 <= asked <= MAX_DRAFT_LENGTH:
        raise RequestError(f"--draft-length is {asked}, expected auto, or a whole number from 0 to {MAX_DRAFT_LENGTH}")
    given: dict[str, Any] = {name: value for name in HELP if (value := getattr(arguments, name)) is not None}
    if arguments.controller is None and not given:
        return asked
    if asked not in (None, AUTO):
        raise RequestError(f"--draft-length {asked} leaves a controller nothing to choose; say auto")
    if arguments.controller == "entropy":
        return EntropyRule(**given)
    if given:
        raise RequestError(f"{flag(next(iter(given)))} belongs to --controller entropy; add that")
    return AUTO


def read_draft_length(text: str) -> DraftLength:
    if text == AUTO or read_shape(text):
        return text
    try:
        return int(text)
    except ValueError:
        expected = "auto, a whole number, a comb like 5+3, or a tree like 4/12 or 3x2x1"
        raise argparse.ArgumentTypeError(f"{text!r}, expected {expected}") from None
