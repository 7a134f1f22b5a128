"""Measure how fast each draft length decodes, and compare it with what theory predicts.

A round is one draft of K tokens and one pass of the target that checks them. Tokens per second count decoding alone,
without the reading of prompts, while all rows of a batch are live. Overhead is the time of a round divided by that of
the engine runs in it: 1.00 is perfect. Bandwidth is the share of the memory's own that a round reaches: its steps read
their weights and what is in their caches. Predicted is what the acceptance would give at the measured costs of a draft
step and of the pass that checks K + 1 tokens, as auto and tune reckon; the paper's formula takes that wider pass for
free.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from ...engines import Bundle, RequestError
from ...runtime.requests.bounds import refuse_long
from ...runtime.state.asked import AUTO, DEFAULT_DRAFT_LENGTH, DRAFTER_NAMES, MIXED, NONE, usual_drafter
from ..drawable import require_drawable, require_matplotlib
from ..whole_file import refuse_unfit
from .compared import CHECKPOINT_FLAGS, OPENVINO_FLAGS, PEERS, compared_folders
from .controller import SOURCES_HELP, refuse_drafter, refuse_lacking
from .draft_lengths import draft_lengths
from .engine import add_engine_flags, engine_name
from .pace import add_pace_flags, settle_pace, times
from .prompt import add_prompts_flag, refuse_prompts
from .sampling import add_number, add_sampling_flags, batch_size, given_fields

SAME, OWN = "bundle", "own"  # numbers in which OpenVINO GenAI computes
BENCH_SAMPLING = (
    "max_new_tokens",
    "temperature",
    "draft_temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "rule",
    "lenience",
    "num_beams",
)
PRINTED = Path("-")  # in place of a file
QUICK_LENGTHS, QUICK_PROMPTS, QUICK_TOKENS = (0, 2, 4), 3, 64
QUICK_WARM_UP = 16  # tokens, with which each setting begins
DRAFT_LENGTHS = (0, 1, 2, 4, 6, 8)


def quick_in_words(lengths: Sequence[object], prompts: int, tokens: int, repeats: int) -> str:
    return f"K of {', '.join(map(str, lengths))}, on {prompts} prompts, {tokens} tokens each, {times(repeats)}"


QUICK = quick_in_words(QUICK_LENGTHS, QUICK_PROMPTS, QUICK_TOKENS, 1)


def settle(arguments: argparse.Namespace) -> None:
    """Let what was left open be as usual, or as quick as `--quick` says; what was stated stays."""
    settle_pace(arguments)
    if arguments.quick:
        arguments.draft_lengths = arguments.draft_lengths or QUICK_LENGTHS
        arguments.max_new_tokens = getattr(arguments, "max_new_tokens", QUICK_TOKENS)


def refuse(arguments: argparse.Namespace) -> None:
    """Settle what was left open, and refuse what is wrong, before anything heavy is loaded."""
    settle(arguments)
    if arguments.plot:
        require_drawable(arguments.plot)
    if arguments.report:
        require_matplotlib()
    fields = given_fields(arguments)
    engine_name(arguments)
    if arguments.drafter == NONE:
        raise RequestError("--drafter none proposes nothing, which is measured as K = 0 in any case; name another")
    refuse_drafter(arguments.drafter)
    refuse_prompts(arguments.prompts)
    bundle = Bundle.read(arguments.bundle)
    refuse_lacking(bundle, arguments, AUTO if AUTO in (arguments.draft_lengths or ()) else None, arguments.batch)
    refuse_long(bundle, fields.max_new_tokens)
    if arguments.compare:
        if bundle.encoders:
            raise RequestError(
                f"--compare {arguments.compare} runs models without an encoder; in a clone, research.hearing compares "
                "a Whisper"
            )
        compared_folders(arguments, arguments.drafter or usual_drafter(bundle))
    refuse_unfit(arguments.report, arguments.plot, None if arguments.json == PRINTED else arguments.json)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bundle", required=True, metavar="B", type=Path, help="the folder that export-models wrote")
    add_prompts_flag(parser)
    parser.add_argument(
        "--draft-lengths",
        type=draft_lengths,
        metavar="K,K,…",
        help="tokens to propose in a round, K+M for M siblings beside a line of K, K/N or AxBxC for a tree; 0 is "
        "always measured as well "
        f"(default: those of {','.join(map(str, DRAFT_LENGTHS))} that the engine can verify, and auto once trt-spec "
        "tune has run)",
    )
    parser.add_argument(
        "--drafter",
        metavar="|".join((*DRAFTER_NAMES, MIXED)),
        help=SOURCES_HELP,
    )
    parser.add_argument(
        "--all-drafters", action="store_true", help=f"also measure all other drafters, at K = {DEFAULT_DRAFT_LENGTH}"
    )
    add_pace_flags(parser, QUICK)
    add_number(parser, "--batch", 1, "prompts to decode together", batch_size)
    parser.add_argument(
        "--json",
        nargs="?",
        const=PRINTED,
        type=Path,
        metavar="OUT",
        help="print one JSON object instead, or write it to this file",
    )
    parser.add_argument("--report", type=Path, metavar="OUT", help="write an HTML page of charts and tables")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw tokens per second over K, into a .png or .svg")
    parser.add_argument(
        "--compare",
        choices=PEERS,
        help=f"also measure {' or '.join(PEERS.values())} on the same models, in turn with this "
        "runtime but in a separate process",
    )
    for role, name in CHECKPOINT_FLAGS.items():
        help_text = f"for --compare hf: the checkpoint that the bundle's {role} was exported from"
        parser.add_argument(name, type=Path, metavar="DIR", help=help_text)
    for role, name in OPENVINO_FLAGS.items():
        help_text = f"for --compare openvino: the {role} as `optimum-cli export openvino` writes it"
        parser.add_argument(name, type=Path, metavar="DIR", help=help_text)
    parser.add_argument(
        "--openvino-precision",
        choices=(SAME, OWN),
        default=SAME,
        help=f"for --compare openvino: compute and cache in the bundle's type ({SAME}, the default), or as it "
        f"chooses for this machine ({OWN})",
    )
    add_engine_flags(parser)
    add_sampling_flags(parser, only=BENCH_SAMPLING)
