"""Teach a draft or a head what its target itself says, so that more of what it proposes is accepted.

The target continues the lines of the prompt file at temperature 1, and a tenth of that is held out to measure on. A
draft begins with a checkpoint, with some of the target's layers, or with nothing. A head reads the target's hidden
states, which are kept beside --out while it learns, in .NAME.training: a run that was killed goes on from there if it
is started again with the same flags. With --minutes the target writes for a third of them at most (for heads a fifth),
and training ends when they are over, or after --steps. What is printed is JSON: the acceptance on what was held out,
before and after.
"""

import argparse
import math
from pathlib import Path
from typing import Any

from ..text_files import read_prompts
from ..training_settings import (
    DRAFT,
    DRAFT_VOCAB,
    HEADS,
    KINDS,
    DraftSettings,
    HeadSettings,
    flag,
    readers_of,
    refuse_pace,
    settings_of,
)
from .sampling import positive

COMMON = {
    "samples": "continuations that the target writes",
    "length": "tokens of each; of heads the prompt is among them",
    "batch": "of these, or for a draft windows of as many tokens, in a step",
}
NOT_SETTINGS = ("kind", "target", "out", "prompts", "chat", "steps", "minutes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=KINDS, metavar="KIND", help=f"what is taught: {', '.join(KINDS)}")
    parser.add_argument("--target", required=True, metavar="DIR_OR_ID", help="the checkpoint that teaches")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the draft or head is written")
    parser.add_argument("--prompts", required=True, type=Path, metavar="FILE", help="a prompt a line, or JSON lines")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="the prompts are what users ask: write each as a chat, by the target's template",
    )
    for name, meaning in COMMON.items():
        parser.add_argument(flag(name), type=int, metavar="N", help=f"{meaning} {_usual(name)}")
    parser.add_argument("--steps", type=int, metavar="N", help=f"of training {_usual('usual_steps')}")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="end training after so long")
    parser.add_argument("--rate", type=float, metavar="X", help=f"peak learning rate {_usual('rate')}")
    parser.add_argument("--seed", type=int, metavar="N", help="of everything drawn (default 0)")
    parser.add_argument("--device", metavar="D", help="cpu or cuda (default cpu)")
    _add(parser, "draft", "start from this checkpoint", metavar="DIR_OR_ID")
    _add(parser, "cut", "start from the target cut down to N of its layers", type=int, metavar="N")
    _add(parser, "layers", f"of a new one (default {DraftSettings.layers})", type=int, metavar="N")
    _add(parser, "hidden", f"width of a new one (default {DraftSettings.hidden})", type=int, metavar="N")
    _add(
        parser,
        "after",
        "learn most of what this draft misses, for several in one round; may be repeated",
        action="append",
        metavar="DIR_OR_ID",
    )
    _add(parser, "reverse", "KL(draft ‖ target) in place of KL(target ‖ draft)", action="store_const", const=True)
    for name, meaning in (
        ("draft_vocab", f"tokens that the head may propose, the most frequent (default {DRAFT_VOCAB})"),
        ("heads", f"heads or look-aheads, each of which says the token of one place (default {HEADS})"),
        ("mlp", "width of its MLP (default twice the hidden size)"),
        ("rank", "of a LoRA that is added where the target reads look-aheads (default none)"),
    ):
        _add(parser, name, meaning, type=positive, metavar="N")


def _add(parser: argparse.ArgumentParser, name: str, meaning: str, **form: Any) -> None:
    parser.add_argument(flag(name), help=f"{', '.join(readers_of(name))}: {meaning}", **form)


def _usual(name: str) -> str:
    draft, head = (f"{getattr(of, name):g}" for of in (DraftSettings, HeadSettings))
    return f"(default {draft} for a draft, {head} for a head)"


def given_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that were given."""
    said = vars(arguments).items()
    return {name: value for name, value in said if value is not None and name not in NOT_SETTINGS}


def refuse(arguments: argparse.Namespace) -> None:
    """Settle what was left open, and refuse what is wrong, before anything heavy is loaded."""
    of = DraftSettings if arguments.kind == DRAFT else HeadSettings
    arguments.steps = of.usual_steps if arguments.steps is None else arguments.steps
    refuse_pace(arguments.steps, arguments.minutes)
    prompts = read_prompts(arguments.prompts)
    settings_of(arguments.kind, arguments.target, prompts, **given_settings(arguments))
    from ...export.checkpoints.finding import require_found
    from ...export.writing.aside import refuse_foreign

    refuse_foreign(arguments.out)
    for checkpoint in (arguments.target, arguments.draft, *(arguments.after or ())):
        if checkpoint is not None:
            require_found(checkpoint)
