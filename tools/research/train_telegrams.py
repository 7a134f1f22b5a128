"""Train the encoder–decoder pair from nothing: two T5 that write out telegrams.

    python -m trt_spec.tools.research.train_telegrams --out DIR [--draft-steps 5000] [--steps 3000] [--device cuda]

`telegrams.py` says what a telegram is and where the sentences come from; one in twenty is held out. Byte-level
BPE of 2,048 tokens, 96 wide; the draft has a layer of encoder and one of decoder (0.38M parameters), the target three
of each (0.75M). Batches of 16 sentences, AdamW at 4e-3 and 1.5e-3 with a cosine to nothing. What takes long is to learn
that most can be copied. So the target begins as the draft with further layers, which add nothing yet, and learns on
from the same text. The same seed and sentences give the same pair on one machine.

The state is kept beside --out, in .NAME.training: a run that was killed goes on from there if it is started again with
the same flags. The folder is removed at the end. The last line is JSON: the held-out losses, and the acceptance of the
draft's proposals on what was held out, as greedy agreement at temperature 0 and as Σ min(p, q) at 1.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ...export.checking.quality import overlap
from ...export.writing.aside import built_aside, refuse_foreign
from ...export.writing.quiet import quiet_libraries
from ..console import say
from ..flags.sampling import add_number
from ..making.heads.state import Progress, restore_progress, restore_weights, save_state
from ..making.training import Loss, refuse_device, train
from ..program import program
from ..training_settings import digest, refuse_below
from .telegrams import all_sentences, is_held_out, telegram
from .train_pair import train_tokenizer

PADDING, END = "<pad>", "</s>"  # ids 0, with which a text begins, and 1
POOL = 8  # batches that are drawn together, so that each can be of sentences about as long
MEASURED = 512  # held-out sentences on which a model is measured
HEAD = 32  # width of a head


@dataclass(frozen=True)
class Size:
    """The sizes that decide how much a T5 costs."""

    hidden: int
    layers: int  # of the encoder, and of the decoder
    mlp: int


DRAFT = Size(hidden=96, layers=1, mlp=192)
LAYERS = 3  # of the target


@dataclass(frozen=True)
class Settings:
    """Settings that make the training of one model this one: it goes on only with the same."""

    size: str
    sentences: str  # a digest of them
    steps: int
    batch: int
    seed: int
    device: str


def train_telegrams(
    out: Path,
    sentences: Sequence[str],
    size: Size = DRAFT,
    layers: int = LAYERS,
    vocab_size: int = 2048,
    batch: int = 16,
    steps: int = 3000,
    draft_steps: int = 5000,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Write `out/target` and `out/draft`, and return their held-out losses and the acceptance by temperature."""
    refuse_below(1, steps=steps, draft_steps=draft_steps, batch=batch)
    refuse_below(0, seed=seed)
    refuse_device(device)
    refuse_foreign(out)
    learned = [one for one in sentences if not is_held_out(one)]
    held_out = [one for one in sentences if is_held_out(one)][:MEASURED]
    say(f"{len(learned):,} sentences to learn from, {len(held_out):,} to measure on")
    tokenizer = telegram_tokenizer(learned, vocab_size)
    folder = out.with_name(f".{out.name}.training")

    def train_one(name: str, model: Any, size: Size, steps: int, rate: float, seed: int) -> Any:
        batches = Telegrams(tokenizer, learned, batch, seed)
        state = State(folder / name, Settings(str(size), digest(sentences), steps, batch, seed, device), model)
        train(name, model.to(device), on_telegrams(model), batches, steps, rate, kept=state)
        return model

    with quiet_libraries():
        torch.manual_seed(seed)
        draft = train_one("draft", new_t5(size, vocab_size), size, draft_steps, 4e-3, seed)
        torch.manual_seed(seed)
        larger = replace(size, layers=layers)
        target = train_one("target", deeper(draft, larger, vocab_size), larger, steps, 1.5e-3, seed + 1)
        measured = measure(target, draft, Telegrams(tokenizer, held_out, 1, seed))
        with built_aside(out) as aside:
            for name, model in (("target", target), ("draft", draft)):
                model.to("cpu", torch.bfloat16).save_pretrained(aside / name)
                tokenizer.save(str(aside / name / "tokenizer.json"))
                said = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": PADDING, "eos_token": END}
                (aside / name / "tokenizer_config.json").write_text(json.dumps(said, indent=1) + "\n")
    shutil.rmtree(folder)
    return {"sentences": len(learned), **measured}


def telegram_tokenizer(sentences: Sequence[str], size: int) -> Tokenizer:
    """A tokenizer of sentences and their telegrams, which ends each text as T5 ends it."""
    tokenizer = train_tokenizer([*sentences, *map(telegram, sentences)], size, [PADDING, END])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", special_tokens=[(END, 1)])
    return tokenizer


def new_t5(size: Size, vocab_size: int) -> Any:
    """Make a model of random weights."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=vocab_size,
        d_model=size.hidden,
        d_kv=HEAD,
        num_heads=size.hidden // HEAD,
        d_ff=size.mlp,
        num_layers=size.layers,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def deeper(model: Any, size: Size, vocab_size: int) -> Any:
    """Return a model of more layers that says the same: those that are added add nothing yet."""
    grown = new_t5(size, vocab_size)
    own = model.state_dict()
    grown.load_state_dict(own, strict=False)
    with torch.no_grad():
        for name, weight in grown.named_parameters():
            if name not in own and name.endswith((".o.weight", ".wo.weight")):
                weight.zero_()
    return grown


class Telegrams:
    """Batches of telegrams and their sentences [2, B, T], drawn by a fixed seed; what is padded is 0."""

    def __init__(self, tokenizer: Tokenizer, sentences: Sequence[str], batch: int, seed: int) -> None:
        both = [
            [torch.tensor(one.ids) for one in tokenizer.encode_batch(texts)]
            for texts in (list(map(telegram, sentences)), list(sentences))
        ]
        self.pairs, self.batch = list(zip(*both, strict=True)), batch
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> Tensor:
        """Draw several batches and take one of them, whose sentences are about as long."""
        drawn = torch.randint(len(self.pairs), (POOL * self.batch,), generator=self._generator).tolist()
        chosen = int(torch.randint(POOL, (), generator=self._generator)) * self.batch
        drawn.sort(key=lambda place: len(self.pairs[place][1]))
        return side_by_side(self.pairs[place] for place in drawn[chosen : chosen + self.batch])


def side_by_side(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    telegrams, sentences = zip(*pairs, strict=True)
    padded = pad_sequence([*telegrams, *sentences], batch_first=True)
    return padded.view(2, len(telegrams), -1)


def on_telegrams(model: Any) -> Loss:
    def loss(pairs: Tensor) -> Tensor:
        telegrams, sentences = pairs
        labels = sentences.masked_fill(sentences == 0, -100)
        found: Tensor = model(input_ids=telegrams, attention_mask=(telegrams != 0).long(), labels=labels).loss
        return found

    return loss


@torch.no_grad()
def measure(target: Any, draft: Any, telegrams: Telegrams) -> dict[str, Any]:
    """Losses on these sentences, and acceptance: greedy agreement at temperature 0, mean Σ min(p, q) at 1."""
    device = next(target.parameters()).device
    losses, acceptance, tokens = {"target_loss": 0.0, "draft_loss": 0.0}, {0.0: 0.0, 1.0: 0.0}, 0
    for source, text in telegrams.pairs:
        given = {"input_ids": source[None].to(device), "labels": text[None].to(device)}
        said = [model(**given) for model in (target, draft)]
        tokens += len(text)
        for name, one in zip(losses, said, strict=True):
            losses[name] += float(one.loss) * len(text)
        for temperature in acceptance:
            acceptance[temperature] += overlap(said[0].logits[0], said[1].logits[0], temperature) * len(text)
    mean = {name: total / tokens for name, total in losses.items()}
    return {"held_out_tokens": tokens, **mean, "acceptance": {t: total / tokens for t, total in acceptance.items()}}


class State:
    """The state of one model's training on the disk."""

    def __init__(self, folder: Path, settings: Settings, model: nn.Module) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.settings, self._model = folder, settings, model

    def restore(self, optimizer: torch.optim.Optimizer) -> int:
        begun = restore_progress(self.folder, self.settings)
        if begun is None:
            return 0
        restore_weights(self.folder, {"model": self._model}, optimizer, begun.step)
        return begun.step

    def save(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        save_state(self.folder, self.settings, Progress(step=step), {"model": self._model}, optimizer)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="where the checkpoints target/ and draft/ are written"
    )
    for name, default, meaning in (
        ("draft-steps", 5000, "of training the draft"),
        ("steps", 3000, "of training the target on from it"),
        ("batch", 16, "sentences of a step"),
        ("seed", 0, "of everything drawn"),
    ):
        add_number(parser, f"--{name}", default, meaning, int)
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu or cuda (default cpu)")


def run(arguments: argparse.Namespace) -> int:
    print(json.dumps(train_telegrams(sentences=all_sentences(), **vars(arguments))))
    return 0


main = program("train_telegrams", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
