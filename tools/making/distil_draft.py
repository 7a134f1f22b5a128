"""Teach a draft to speak like its target: trained on what the target itself samples, towards its probabilities.

It starts from a checkpoint, from the target itself cut down to a few of its layers, or from nothing: a Llama with the
target's vocabulary. One that is cut keeps the target's embedding and vocabulary projection as they are, so that its
layers alone are learned.

The target continues the prompts at temperature 1; every tenth continuation is held out. The loss is KL(target ‖ draft),
or KL(draft ‖ target). After other drafts it learns most of what they miss, as SpecInfer tunes its drafts. Acceptance
before and after is measured on what was held out.
"""

import math
import shutil
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
from ..training_settings import DRAFT, DraftSettings, refuse_pace, settings_of
from .cut_down import cut_down
from .growing import LlamaSize
from .prompts import token_ids
from .training import (
    Windows,
    acceptance,
    acceptance_of_misses,
    boosted_loss,
    distillation_loss,
    new_llama,
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
    steps: int = DraftSettings.usual_steps,
    minutes: float = math.inf,
    **options: Any,  # fields of DraftSettings
) -> dict[str, Any]:
    """Write the distilled draft to `out` and return the acceptance before and after, by temperature."""
    settings = settings_of(DRAFT, target, prompts, **options)
    assert isinstance(settings, DraftSettings)
    refuse_pace(steps, minutes)
    refuse_device(settings.device)
    began, seconds, length, device = monotonic(), 60 * minutes, settings.length, settings.device
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
        torch.manual_seed(settings.seed)
        if settings.cut is None:
            student = _student(checkpoint, vocabulary, settings).to(device)
        else:
            student = cut_down(teacher, settings.cut)
        earlier = [_given(one, vocabulary).to(device) for one in settings.after]
        spoken = sample(teacher, ids, settings.samples, length, device, began + WRITING * seconds)
        learned = torch.cat([row for index, row in enumerate(spoken) if index % HELD_OUT])
        kept = torch.cat([row for index, row in enumerate(spoken) if index % HELD_OUT == 0])
        width = min(length, len(kept) - 1)
        measured = Windows(kept, width, 1, settings.seed).fixed()
        before = acceptance(teacher, student, measured)
        missed = acceptance_of_misses(teacher, student, earlier, measured) if earlier else {}
        windows = Windows(learned, width, settings.batch, settings.seed)
        loss = (
            boosted_loss(student, teacher, earlier)
            if earlier
            else distillation_loss(student, teacher, settings.reverse)
        )
        done = train(DRAFT, student, loss, windows, steps, settings.rate, began + seconds)
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


def _student(checkpoint: Checkpoint, vocabulary: Any, settings: DraftSettings) -> Any:
    if settings.draft is not None:
        return _given(settings.draft, vocabulary)
    hidden = settings.hidden
    size = LlamaSize(hidden, settings.layers, heads=max(1, hidden // 64), kv_heads=1, mlp=3 * hidden)
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
