"""Train the demo pair from nothing: a tokenizer, a Llama target, and a draft towards the target's probabilities.

    python -m trt_spec.tools.research.train_pair --out DIR [--steps 6000] [--draft-steps 6000] [--device cuda]

The text is Python source: the standard library of the running interpreter and the packages installed beside it, in the
order of their paths. Every twentieth file of the standard library is held out. Byte-level BPE of 4,096 tokens; target
384 × 8 layers (14.2M parameters), draft 128 × 2 (0.9M), windows of 512 tokens in batches of 16, AdamW at 1e-3 and
2e-3 with a cosine to nothing; the draft by KL(target ‖ draft). The same seed and files give the same pair on one
machine.
"""

import argparse
import json
import random
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from ...export.writing.aside import built_aside
from ..console import say
from ..flags.sampling import add_number
from ..making.growing import LlamaSize
from ..making.training import (
    Windows,
    acceptance,
    distillation_loss,
    held_out_loss,
    new_llama,
    next_token_loss,
    refuse_device,
    train,
)
from ..program import program
from ..training_settings import refuse_below

TARGET = LlamaSize(hidden=384, layers=8, heads=6, kv_heads=2, mlp=1024)
DRAFT = LlamaSize(hidden=128, layers=2, heads=2, kv_heads=1, mlp=384)
END = "<|endoftext|>"  # id 0, between files
HELD_OUT = 20  # one file of the standard library in so many
LARGEST_FILE = 200_000  # bytes; longer ones are tables
INSTALLED = {"site-packages", "dist-packages"}  # folders of packages that lie in the library's own


def source_files() -> tuple[list[Path], list[Path]]:
    """The files to learn from, and those held out."""
    own = library_files()
    learned = [file for index, file in enumerate(own) if index % HELD_OUT]
    return [*learned, *python_files(Path(sysconfig.get_path("purelib")))], own[::HELD_OUT]


def library_files() -> list[Path]:
    """The files of the standard library, without packages that the interpreter keeps among them."""
    return [file for file in python_files(Path(sysconfig.get_path("stdlib"))) if not INSTALLED & set(file.parts)]


def python_files(folder: Path) -> list[Path]:
    return [file for file in sorted(folder.rglob("*.py")) if 0 < file.stat().st_size <= LARGEST_FILE]


def texts(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        try:
            yield file.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few test files are meant to be no UTF-8
            continue


def train_tokenizer(learned: Iterable[str], size: int, special: Sequence[str] = (END,)) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(learned, trainer)
    return tokenizer


def stream(tokenizer: Tokenizer, files: Sequence[Path]) -> Tensor:
    """All tokens of the files, with an end of text before each file."""
    parts = [torch.tensor([0, *tokenizer.encode(text).ids]) for text in texts(files)]
    return torch.cat(parts)


def train_pair(
    out: Path,
    files: tuple[Sequence[Path], Sequence[Path]],
    shapes: tuple[LlamaSize, LlamaSize] = (TARGET, DRAFT),
    vocab_size: int = 4096,
    width: int = 512,
    batch: int = 16,
    steps: int = 6000,
    draft_steps: int = 6000,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Write `out/target` and `out/draft`, and return their held-out losses and the acceptance by temperature."""
    refuse_below(1, steps=steps, draft_steps=draft_steps, batch=batch, width=width)
    refuse_device(device)
    learned, held_out = files
    random.Random(seed).shuffle(order := list(learned))
    with built_aside(out) as folder:
        tokenizer = train_tokenizer(texts(order), vocab_size)
        text = stream(tokenizer, order)
        measured = Windows(stream(tokenizer, held_out), width, 1, seed).fixed(64)
        say(f"{len(text):,} tokens to learn from, {measured.numel():,} to measure on")
        torch.manual_seed(seed)
        target, draft = (
            new_llama(shape, vocab_size, 4 * width, bos_token_id=0, eos_token_id=0, pad_token_id=0).to(device)
            for shape in shapes
        )
        train("target", target, next_token_loss(target), Windows(text, width, batch, seed), steps, 1e-3)
        windows = Windows(text, width, batch, seed + 1)
        train("draft", draft, distillation_loss(draft, target), windows, draft_steps, 2e-3)
        found = {
            "tokens": len(text),
            "target_loss": held_out_loss(target, measured),
            "draft_loss": held_out_loss(draft, measured),
            "acceptance": acceptance(target, draft, measured),
        }
        for name, model in (("target", target), ("draft", draft)):
            save(model, tokenizer, folder / name)
    return found


def save(model: Any, tokenizer: Tokenizer, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write a checkpoint."""
    model.to("cpu", dtype).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": END, "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="where the checkpoints target/ and draft/ are written"
    )
    for name, default, meaning in (
        ("steps", 6000, "of training the target"),
        ("draft-steps", 6000, "of training the draft"),
        ("batch", 16, "windows of a step"),
        ("width", 512, "tokens of a window"),
        ("seed", 0, "of everything drawn"),
    ):
        add_number(parser, f"--{name}", default, meaning, int)
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu or cuda (default cpu)")


def run(arguments: argparse.Namespace) -> int:
    print(json.dumps(train_pair(files=source_files(), **vars(arguments))))
    return 0


main = program("train_pair", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
