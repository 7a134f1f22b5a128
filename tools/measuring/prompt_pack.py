"""The prompts that bench is shipped with: real ones of four kinds, and random tokens of the bundle's own vocabulary."""

import argparse
import random
from pathlib import Path

from ...runtime.decoder import Prompt
from ..flags.prompt import PYTHON_PROMPTS, read_prompts

FOLDER = Path(__file__).parent / "prompts"
WRITTEN = ("code", "prose", "repetition", "chat")  # a file each
KINDS = ("python", *WRITTEN, "random")
RANDOM_PROMPTS, RANDOM_TOKENS = 8, 64


def add_prompts_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        metavar="KIND|F",
        default="python",
        help=f"those shipped: {', '.join(KINDS)} (default python); or a file: a prompt a line; .jsonl: "
        '{"prompt": "text"} a line',
    )


def bench_prompts(source: str, vocab_size: int) -> list[Prompt]:
    """Those of a kind, or of the file `source`."""
    if source == "python":
        return list(PYTHON_PROMPTS)
    if source == "random":
        generator = random.Random(0)
        return [[generator.randrange(vocab_size) for _ in range(RANDOM_TOKENS)] for _ in range(RANDOM_PROMPTS)]
    return list(read_prompts(FOLDER / f"{source}.jsonl" if source in WRITTEN else Path(source)))
