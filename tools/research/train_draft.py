"""Train a draft with tokens of its own from nothing: a tokenizer and a small Llama, for any target.

    python -m trt_spec.tools.research.train_draft --out DIR [--vocab 1024] [--minutes 25] [--device cuda]

The text is the Python source that `train_pair` learns from, without the installed packages. Byte-level BPE of --vocab
tokens; a Llama of 128 × 2, windows of 256 tokens in batches of 16, AdamW at 2e-3 with a cosine to nothing.
"""

import argparse
import json
import math
import random
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from ...engines import RequestError
from ...export.writing.aside import built_aside
from ..flags.sampling import add_number
from ..making.growing import LlamaSize
from ..making.training import Windows, held_out_loss, new_llama, next_token_loss, refuse_device, train
from ..program import program
from ..training_settings import refuse_below
from .train_pair import DRAFT, save, source_files, stream, texts, train_tokenizer


def train_draft(
    out: Path,
    files: tuple[Sequence[Path], Sequence[Path]],
    shape: LlamaSize = DRAFT,
    vocab: int = 1024,
    width: int = 256,
    batch: int = 16,
    steps: int = 10_000,
    minutes: float = math.inf,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Write the draft to `out`, and return its held-out loss in nats a token and a byte."""
    refuse_below(1, steps=steps, batch=batch, width=width)
    refuse_below(257, vocab=vocab)
    refuse_device(device)
    if not minutes > 0:
        raise RequestError(f"--minutes is {minutes:g}, expected more than 0")
    learned, held_out = files
    random.Random(seed).shuffle(order := list(learned))
    with built_aside(out) as folder:
        tokenizer = train_tokenizer(texts(order), vocab)
        text, kept = stream(tokenizer, order), stream(tokenizer, held_out)
        measured = Windows(kept, width, 1, seed).fixed(32)
        torch.manual_seed(seed)
        draft = new_llama(shape, vocab, 16 * width, bos_token_id=0, eos_token_id=0, pad_token_id=0).to(device)
        until = monotonic() + 60 * minutes
        done = train("draft", draft, next_token_loss(draft), Windows(text, width, batch, seed), steps, 2e-3, until)
        loss = held_out_loss(draft, measured)
        size = len(tokenizer.decode(measured.flatten().tolist()).encode())
        save(draft, tokenizer, folder)
    return {"tokens": len(text), "steps": done, "loss": loss, "loss_a_byte": loss * measured.numel() / size}


def own_files() -> tuple[list[Path], list[Path]]:
    """The files of the standard library to learn from, and those held out."""
    packages = Path(sysconfig.get_path("purelib"))
    learned, held_out = source_files()
    return [file for file in learned if packages not in file.parents], held_out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the draft is written")
    for name, default, meaning in (
        ("vocab", 1024, "tokens"),
        ("steps", 10_000, "of training"),
        ("batch", 16, "windows of a step"),
        ("width", 256, "tokens of a window"),
        ("seed", 0, "of everything drawn"),
    ):
        add_number(parser, f"--{name}", default, meaning, int)
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="end training after so long")
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu or cuda (default cpu)")


def run(arguments: argparse.Namespace) -> int:
    print(json.dumps(train_draft(files=own_files(), **vars(arguments))))
    return 0


main = program("train_draft", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
