"""Train the shipped hybrid: a small Qwen3.5, of three gated delta nets and a layer that attends.

    python -m trt_spec.tools.research.train_hybrid --out DIR [--steps 1400] [--device cuda]

It learns to say what the demo's target says, by KL(target ‖ hybrid), has its tokenizer, and begins with the embedding
of the demo's draft. The text is the Python source that `train_draft` learns from, one file in twenty held out. Four
layers of 128 (1.4M parameters), windows of 256 tokens in batches of 8, AdamW at 3e-3 with a cosine to nothing. The
same seed and files give the same hybrid on one machine.

The last line is JSON: the held-out loss, what it would be without each of the recurrent layers, and the acceptance of
the hybrid's proposals by the target.
"""

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from ...export.checkpoints.checkpoint import load_model, open_checkpoint
from ...export.writing.aside import built_aside
from ...export.writing.quiet import quiet_libraries
from ..console import say
from ..flags.sampling import add_number
from ..making.growing import LlamaSize
from ..making.kept_bundles import DEMO_DRAFTS, TARGET
from ..making.training import Windows, acceptance, distillation_loss, held_out_loss, refuse_device, train
from ..program import program
from ..training_settings import refuse_below
from .train_draft import own_files
from .train_pair import save, stream

SIZE = LlamaSize(hidden=128, layers=4, heads=2, kv_heads=1, mlp=384)
ATTENDS = 2  # the layer that does
DELTA = {  # a state of 4 × 32 × 32 numbers in each other layer
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
MEASURED = 64  # held-out windows


def train_hybrid(
    out: Path,
    files: tuple[Sequence[Path], Sequence[Path]],
    width: int = 256,
    batch: int = 8,
    steps: int = 1400,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, Any]:
    """Write the hybrid to `out`, and return what was measured."""
    refuse_below(1, steps=steps, batch=batch, width=width)
    refuse_device(device)
    learned, held_out = files
    random.Random(seed).shuffle(order := list(learned))
    with quiet_libraries(), built_aside(out) as folder:
        tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
        target = load_model(open_checkpoint(str(TARGET)), "bfloat16").to(device)
        text, kept = stream(tokenizer, order), stream(tokenizer, held_out)
        measured = Windows(kept, width, 1, seed).fixed(MEASURED)
        say(f"{len(text):,} tokens to learn from, {measured.numel():,} to measure on")
        torch.manual_seed(seed)
        hybrid = new_hybrid(target.config.vocab_size, target.config.max_position_embeddings)
        draft = load_model(open_checkpoint(str(DEMO_DRAFTS["model"])), "float32")
        hybrid.get_input_embeddings().load_state_dict(draft.get_input_embeddings().state_dict())
        windows = Windows(text, width, batch, seed)
        train("hybrid", hybrid.to(device), distillation_loss(hybrid, target), windows, steps, 3e-3)
        found = {
            "parameters": sum(weight.numel() for weight in hybrid.parameters()),
            "tokens": len(text),
            "loss": held_out_loss(hybrid, measured),
            "loss_without_layer": {layer: loss_without(hybrid, layer, measured) for layer in recurrent(hybrid)},
            "acceptance": acceptance(target, hybrid, measured),
        }
        save(hybrid, tokenizer, folder, torch.float16)
    return found


def new_hybrid(vocab_size: int, positions: int, size: LlamaSize = SIZE) -> Any:
    """Make a model of random weights."""
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=vocab_size,
        hidden_size=size.hidden,
        intermediate_size=size.mlp,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=min(64, size.hidden),
        layer_types=["full_attention" if layer == ATTENDS else "linear_attention" for layer in range(size.layers)],
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **DELTA,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def recurrent(hybrid: Any) -> list[int]:
    return [layer for layer, kind in enumerate(hybrid.config.layer_types) if kind == "linear_attention"]


@torch.no_grad()
def loss_without(hybrid: Any, layer: int, windows: torch.Tensor) -> float:
    """Return the loss where a recurrent layer says nothing: what the others cannot say in its place."""
    said = hybrid.model.layers[layer].linear_attn.out_proj.weight
    before = said.clone()
    said.zero_()
    found = held_out_loss(hybrid, windows)
    said.copy_(before)
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the hybrid is written")
    for name, default, meaning in (
        ("steps", 1400, "of training"),
        ("batch", 8, "windows of a step"),
        ("width", 256, "tokens of a window"),
        ("seed", 0, "of everything drawn"),
    ):
        add_number(parser, f"--{name}", default, meaning, int)
    parser.add_argument("--device", default="cpu", metavar="D", help="cpu or cuda (default cpu)")


def run(arguments: argparse.Namespace) -> int:
    print(json.dumps(train_hybrid(files=own_files(), **vars(arguments))))
    return 0


main = program("train_hybrid", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
