"""Teach a draft to speak like its target: trained on what the target itself samples, towards its probabilities.

    python -m trt_spec.tools.making.distil_draft --target T --out OUT --prompts FILE
        [--draft D | --cut 2 | --layers 2 --hidden 128] [--minutes 20] [--after A]

Starts from the checkpoint --draft, from the target itself cut down to a few of its layers with --cut, or from nothing:
a Llama of --layers and --hidden with the target's vocabulary. One that is cut keeps the target's embedding and
vocabulary projection as they are, so that its layers alone are learned.

The target continues the lines of the prompt file at temperature 1; every tenth continuation is held out. The loss is
KL(target ‖ draft), or with --reverse KL(draft ‖ target). Acceptance before and after is measured on what was held out.
With --minutes the target writes for a third of them at most, and training ends when they are over, or after --steps.
For a chat model say --chat: the prompts are then what users ask, and become chats that the target answers.

With --after A, the draft that a bundle has already, it learns most of what A misses, as SpecInfer tunes its drafts: for
several in one round (export-models --draft A --draft OUT, --drafter model+model2). Say --after again for more.
"""

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ...engines import PairError, RequestError
from ...export.checkpoints.agreement import refuse_unequal
from ...export.checkpoints.checkpoint import Checkpoint, load_model, open_checkpoint
from ...export.checkpoints.vocabulary import read_vocabulary
from ...export.writing.aside import built_aside
from ...export.writing.quiet import quiet_libraries
from ..console import progress
from ..flags.sampling import add_number
from ..program import program
from .cut_down import cut_down
from .growing import LlamaSize
from .prompts import add_prompts_flags, read_chosen_prompts, token_ids
from .training import (
    Windows,
    acceptance,
    acceptance_of_misses,
    boosted_loss,
    distillation_loss,
    new_llama,
    refuse_below,
    refuse_device,
    train,
)

HELD_OUT = 10  # one continuation in so many
TOGETHER = 16  # continuations that the target writes at once
WRITING = 1 / 3  # share of --minutes in which the target may write
TOKENIZER_FILES = ("tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def distil(
    target: str,
    out: Path,
    prompts: Sequence[str],
    draft: str | None = None,
    cut: int | None = None,
    layers: int = 2,
    hidden: int = 128,
    samples: int = 400,
    length: int = 128,
    batch: int = 16,
    steps: int = 2000,
    minutes: float = math.inf,
    rate: float = 1e-3,
    reverse: bool = False,
    after: Sequence[str] = (),
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Write the distilled draft to `out` and return the acceptance before and after, by temperature."""
    refuse_below(2, samples=samples, length=length)
    refuse_below(1, layers=layers, batch=batch, steps=steps)
    if not minutes > 0:
        raise RequestError(f"--minutes is {minutes:g}, expected more than 0")
    if cut is not None and draft is not None:
        raise RequestError("--draft and --cut both say what to start from; leave one out")
    if hidden < 2 or hidden % min(64, hidden) or hidden % 2:
        raise RequestError(f"--hidden is {hidden}, expected a multiple of 64, or an even number below")
    if not 0 < rate < 1:
        raise RequestError(f"--rate is {rate}, expected a number between 0 and 1")
    if after and reverse:
        raise RequestError("--reverse is for a draft alone; leave it out, or --after")
    refuse_device(device)
    began, seconds = monotonic(), 60 * minutes
    with quiet_libraries(), built_aside(out) as folder:
        checkpoint = open_checkpoint(target)
        vocabulary = read_vocabulary(checkpoint)
        ids = token_ids(vocabulary.tokenizer, prompts)
        longest = max(map(len, ids), default=0)
        if not 0 < longest <= checkpoint.shape.positions - length:
            raise RequestError(
                f"the longest prompt has {longest} tokens, expected 1 to {checkpoint.shape.positions - length}: the "
                f"target has {checkpoint.shape.positions} positions, and --length is {length}"
            )
        teacher = load_model(checkpoint, "float32").to(device)
        torch.manual_seed(seed)
        if cut is None:
            student = _student(checkpoint, vocabulary, draft, layers, hidden).to(device)
        else:
            student = cut_down(teacher, cut)
        earlier = [_given(one, vocabulary).to(device) for one in after]
        spoken = sample(teacher, ids, samples, length, device, began + WRITING * seconds)
        learned = torch.cat([row for index, row in enumerate(spoken) if index % HELD_OUT])
        kept = torch.cat([row for index, row in enumerate(spoken) if index % HELD_OUT == 0])
        width = min(length, len(kept) - 1)
        measured = Windows(kept, width, 1, seed).fixed()
        before = acceptance(teacher, student, measured)
        missed = acceptance_of_misses(teacher, student, earlier, measured) if earlier else {}
        windows = Windows(learned, width, batch, seed)
        loss = boosted_loss(student, teacher, earlier) if earlier else distillation_loss(student, teacher, reverse)
        done = train("draft", student, loss, windows, steps, rate, began + seconds)
        found: dict[str, Any] = {"before": before, "after": acceptance(teacher, student, measured)}
        if earlier:
            now = acceptance_of_misses(teacher, student, earlier, measured)
            found |= {"of_what_others_miss": {"before": missed, "after": now}}
        student.to("cpu", torch.bfloat16).save_pretrained(folder)
        vocabulary.save(folder / "tokenizer.json")
        for name in TOKENIZER_FILES:
            if (checkpoint.path / name).is_file():
                shutil.copyfile(checkpoint.path / name, folder / name)
    parameters = sum(weight.numel() for weight in student.parameters())
    learned_from = {"continuations": len(spoken), "steps": done}
    return {"parameters": parameters, **learned_from, **found, "held_out_tokens": measured.numel()}


def _student(checkpoint: Checkpoint, vocabulary: Any, draft: str | None, layers: int, hidden: int) -> Any:
    if draft is not None:
        return _given(draft, vocabulary)
    size = LlamaSize(hidden, layers, heads=max(1, hidden // 64), kv_heads=1, mlp=3 * hidden)
    end = next(iter(vocabulary.eos_token_ids), None)
    shape = checkpoint.shape
    return new_llama(size, shape.vocab_size, shape.positions, bos_token_id=vocabulary.bos_token_id, eos_token_id=end)


def _given(draft: str, vocabulary: Any) -> Any:
    given = open_checkpoint(draft)
    refuse_unequal(vocabulary, read_vocabulary(given))
    if (lacking := vocabulary.entry().vocab_size - given.shape.vocab_size) > 0:
        raise PairError(f"draft {draft} lacks {lacking} tokens of the target, and cannot learn them; choose another")
    return load_model(given, "float32")


@torch.no_grad()
def sample(
    model: Any, prompts: Sequence[Sequence[int]], count: int, length: int, device: str, until: float = math.inf
) -> list[Tensor]:
    """Let the model continue the prompts in turn at temperature 1; return the continuations without the prompts.

    There are `count` of them, or fewer if the clock has come to `until`, but some that are held out in any case.
    """
    spoken: list[Tensor] = []
    with progress("target", total=-(-count // TOGETHER), ticking=True) as show:
        while len(spoken) < count and (monotonic() < until or len(spoken) < 2):
            chosen = range(len(spoken), min(count, len(spoken) + TOGETHER))
            show(f"continues prompts {chosen[0] + 1} to {chosen[-1] + 1} of {count}")
            rows = [torch.tensor(prompts[index % len(prompts)], device=device) for index in chosen]
            padded = pad_sequence(rows, batch_first=True, padding_side="left")
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
            full = model.generate(
                padded, attention_mask=mask, do_sample=True, top_k=0, min_new_tokens=length, max_new_tokens=length
            )
            spoken += full[:, padded.shape[1] :].cpu()
    return spoken


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, metavar="DIR_OR_ID", help="the checkpoint that teaches")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the draft is written")
    add_prompts_flags(parser)
    parser.add_argument("--draft", metavar="DIR_OR_ID", help="start from this checkpoint")
    parser.add_argument("--cut", type=int, metavar="N", help="start from the target cut down to N of its layers")
    parser.add_argument(
        "--after", action="append", default=[], metavar="DIR_OR_ID", help="learn most of what this draft misses"
    )
    for name, default, meaning in (
        ("layers", 2, "of a new draft"),
        ("hidden", 128, "width of a new draft"),
        ("samples", 400, "continuations that the target writes"),
        ("length", 128, "tokens of each"),
        ("batch", 16, "windows of --length tokens in a step"),
        ("steps", 2000, "of training"),
        ("seed", 0, "of everything drawn"),
    ):
        add_number(parser, f"--{name}", default, meaning, int)
    add_number(parser, "--rate", 1e-3, "peak learning rate", float, letter="X")
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="M", help="end training after so long")
    parser.add_argument("--reverse", action="store_true", help="KL(draft ‖ target) instead of KL(target ‖ draft)")
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu or cuda (default cpu)")


def run(arguments: argparse.Namespace) -> int:
    read_chosen_prompts(arguments)
    print(json.dumps(distil(**vars(arguments))))
    return 0


main = program("distil_draft", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
