"""Certify that a bundle, in an engine on this machine, says just what its target alone would say.

Exit code 1 when a check fails: the distribution of what is sampled, the same text for every draft length, drafter,
batch and engine, caches after rollback, what request parameters mean, and, with --checkpoint, the export.
"""

import argparse
from pathlib import Path

from ...engines import RequestError
from ..certificate.effort import FULL, POWER, QUICK
from ..whole_file import refuse_unfit
from .adapters import refuse_adapters
from .engine import add_engine_flags, engine_name
from .sampling import positive

CLAIMS = {
    "checkpoint": "the exported target computes what its checkpoint computes in transformers",
    "same text": "with any drafter, any line, comb or tree of proposals, and any batch a request gets, token for "
    "token, what it gets alone without speculation; a near tie is two tokens whose scores lie closer than the engine "
    "rounds, so that either may win",
    "semantics": "stop rules, penalties, filters and log-probabilities mean what they mean without speculation",
    "rollback": "after rejected proposals, in lines, combs and trees, the caches hold what they would hold had nothing "
    "been proposed, and recurrent layers have absorbed just that, also of prompts that are read side by side or found "
    "kept; what is planted in these must be caught",
    "distribution": "sampled tokens are distributed as the target's own (χ² against exact probabilities, or, of trees "
    "under rule coupled, each sample against what exact scores and its seed's noise say). A case runs in the engine "
    "throughout, or its target recalls what the engine has said after the same context. Each planted fault must be "
    "caught, or the check itself would be worth nothing",
}
CHECKS = tuple(name.replace(" ", "-") for name in CLAIMS)
BATCH = 64


def refuse(arguments: argparse.Namespace) -> None:
    """Refuse what flags and files say wrong, before anything heavy is loaded."""
    if arguments.checkpoint is None and "checkpoint" in (arguments.only or ()):
        raise RequestError("--only checkpoint needs --checkpoint DIR; name what the bundle was exported from")
    if arguments.checkpoint is not None:
        from ...export.checkpoints.finding import require_found

        require_found(str(arguments.checkpoint))
    engine_name(arguments)
    refuse_adapters(filter(None, [arguments.adapter]), arguments.bundle, arguments.engine)
    refuse_unfit(arguments.json)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="made by export-models")
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="what the bundle's target was exported from")
    parser.add_argument("--adapter", metavar="DIR", type=Path, help="certify the target with this LoRA adapter")
    parser.add_argument(
        "--only", action="append", choices=CHECKS, help="run this check, not all of them; may be repeated"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="take a minute for a pair like the demo's, not minutes: total variation "
        f"{QUICK.total_variation:g}; left out are {', '.join(QUICK.left_out)}",
    )
    parser.add_argument(
        "--batch", type=positive, default=BATCH, metavar="N", help=f"the most rows decoded together (default {BATCH})"
    )
    parser.add_argument(
        "--total-variation",
        type=_share,
        metavar="X",
        help=f"the share of probability that a fault has to move to be caught with power {POWER:g}; "
        f"samples grow with its inverse square (default {FULL.total_variation:g})",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write what was found to this file, too")
    add_engine_flags(parser)


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.001 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number from 0.001 to 1")
    return value
