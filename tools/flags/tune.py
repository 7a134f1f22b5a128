"""Measure what a round costs on this machine by draft length and batch, and keep the table in the bundle.

From then on auto is the default draft length: each round chooses the most rewarding length, by this table and by how
many of the request's own proposals were accepted so far. The last line of the output is one JSON object. With
--engine auto it first finds the fastest engines for each number of requests, and then measures in all of these.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ...engines import Bundle
from ...runtime.lengths.costs import refuse_unwritable
from ...runtime.requests.bounds import refuse_long
from ..whole_file import refuse_unfit
from .draft_lengths import fixed_draft_lengths
from .engine import add_engine_flags, engine_name
from .pace import add_pace_flags, settle_pace, times
from .prompt import add_prompts_flag, refuse_prompts
from .sampling import LARGEST_BATCH, add_sampling_flags, batch_size, given_fields

DRAFT_LENGTHS = (0, 1, 2, 4, 8, 16)
QUICK_LENGTHS, QUICK_BATCHES, QUICK_TOKENS = (0, 2, 4), (1, 2), 16
BATCHES = (1, 2, 4, 8)
NEW_TOKENS = 32
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "rule")


def quick_in_words(lengths: Sequence[int], batches: Sequence[int], tokens: int, repeats: int) -> str:
    numbers = " and ".join(map(str, batches))
    lengths_named = ", ".join(map(str, lengths))
    return f"draft lengths {lengths_named}, batches {numbers}, {tokens} tokens, {times(repeats)}, and no combs or trees"


QUICK = quick_in_words(QUICK_LENGTHS, QUICK_BATCHES, QUICK_TOKENS, 1)


def settle(arguments: argparse.Namespace) -> None:
    """Let what was left open be as usual, or as quick as `--quick` says; what was stated stays."""
    quick = arguments.quick
    settle_pace(arguments)
    arguments.batches = arguments.batches or (QUICK_BATCHES if quick else BATCHES)
    if arguments.max_new_tokens is None:
        arguments.max_new_tokens = QUICK_TOKENS if quick else NEW_TOKENS
    if quick:
        arguments.draft_lengths = arguments.draft_lengths or QUICK_LENGTHS


def refuse(arguments: argparse.Namespace) -> None:
    """Settle what was left open, and refuse what is wrong, before anything heavy is loaded."""
    settle(arguments)
    fields = given_fields(arguments)
    engine_name(arguments)
    refuse_prompts(arguments.prompts)
    bundle = Bundle.read(arguments.bundle)
    refuse_long(bundle, fields.max_new_tokens)
    refuse_unwritable(bundle)
    refuse_unfit(arguments.json)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="the folder that export-models wrote")
    add_prompts_flag(parser)
    parser.add_argument(
        "--draft-lengths",
        type=fixed_draft_lengths,
        metavar="K,K,…",
        help="tokens to propose in a round; 0 is always measured as well (default: those of "
        f"{','.join(map(str, DRAFT_LENGTHS))} that the engine can verify)",
    )
    parser.add_argument(
        "--batches",
        type=_batches,
        metavar="N,N,…",
        help=f"numbers of requests to decode together (default {','.join(map(str, BATCHES))}); --engine auto finds the "
        "engines that are fastest up to each of them",
    )
    add_pace_flags(parser, QUICK)
    parser.add_argument(
        "--all-drafts", action="store_true", help="measure every draft of the bundle as a drafter, not the first alone"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the JSON object to this file as well")
    add_engine_flags(parser)
    add_sampling_flags(parser, only=SAMPLING, max_new_tokens=NEW_TOKENS)
    parser.set_defaults(max_new_tokens=None)  # which tells what was stated from what was not


def _batches(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({batch_size(part) for part in text.split(",")}))
    except argparse.ArgumentTypeError:
        expected = f"expected whole numbers from 1 to {LARGEST_BATCH} like 1,2,4"
        raise argparse.ArgumentTypeError(f"{text[:40]!r}, {expected}") from None
