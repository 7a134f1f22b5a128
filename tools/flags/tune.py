"""Measure what a round costs on this machine by draft length and batch, and keep the table in the bundle.

From then on auto is the default draft length: each round chooses the most rewarding length, by this table and by how
many of the request's own proposals were accepted so far. The last line of the output is one JSON object. With
--engine auto it first finds the fastest engines for each number of requests, and then measures in all of these.
"""

import argparse
from pathlib import Path

from ..whole_file import refuse_unfit
from .bench import QUICK_MODEL
from .draft_lengths import fixed_draft_lengths
from .engine import add_engine_flags, engine_name
from .prompt import add_prompts_flag, refuse_prompts
from .sampling import LARGEST_BATCH, add_number, add_sampling_flags, batch_size, refuse_sampling

DRAFT_LENGTHS = (0, 1, 2, 4, 8, 16)
QUICK_LENGTHS, QUICK_BATCHES, QUICK_TOKENS = (0, 2, 4), (1, 2), 16
QUICK = (
    f"draft lengths {', '.join(map(str, QUICK_LENGTHS))}, batches {' and '.join(map(str, QUICK_BATCHES))}, "
    f"{QUICK_TOKENS} tokens, once, and no combs or trees"
)
BATCHES = (1, 2, 4, 8)
NEW_TOKENS = 32
SAMPLING = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "rule")


def made_quick(arguments: argparse.Namespace) -> None:
    """Let what was left open be as quick as `--quick` says, if that was asked for."""
    if arguments.quick:
        arguments.repeats = 1
        arguments.draft_lengths = arguments.draft_lengths or QUICK_LENGTHS
        arguments.batches = QUICK_BATCHES if arguments.batches == BATCHES else arguments.batches
        arguments.max_new_tokens = QUICK_TOKENS if arguments.max_new_tokens == NEW_TOKENS else arguments.max_new_tokens


def refuse(arguments: argparse.Namespace) -> None:
    """Refuse what flags and files say wrong, before anything heavy is loaded."""
    refuse_sampling(arguments)
    engine_name(arguments)
    refuse_prompts(arguments.prompts)
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
        default=BATCHES,
        metavar="N,N,…",
        help=f"numbers of requests to decode together (default {','.join(map(str, BATCHES))}); --engine auto finds the "
        "engines that are fastest up to each of them",
    )
    parser.add_argument("--quick", action="store_true", help=f"take less than two minutes for {QUICK_MODEL}: {QUICK}")
    add_number(parser, "--repeats", 3, "times each setting has its turn")
    parser.add_argument(
        "--all-drafts", action="store_true", help="measure every draft of the bundle as a drafter, not the first alone"
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the JSON object to this file as well")
    add_engine_flags(parser)
    add_sampling_flags(parser, only=SAMPLING, max_new_tokens=NEW_TOKENS)


def _batches(text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({batch_size(part) for part in text.split(",")}))
    except argparse.ArgumentTypeError:
        expected = f"expected whole numbers from 1 to {LARGEST_BATCH} like 1,2,4"
        raise argparse.ArgumentTypeError(f"{text[:40]!r}, {expected}") from None
