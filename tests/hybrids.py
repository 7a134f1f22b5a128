"""Bundles of recurrent models for tests, and what transformers says of both."""

import random
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from .bundles import export_pair
from .families import VOCAB, tiny_checkpoint

NOISE = 0.03  # of a draft's weights, in standard deviations
LAYERS = {  # recurrent ones on both sides of one that attends
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
}


@dataclass(frozen=True)
class Hybrid:
    """A bundle of a recurrent target and a recurrent draft like it, and both in transformers."""

    bundle: Path
    target: Any
    draft: Any
    name: str = "model"

    def features(self, tokens: list[int]) -> torch.Tensor:
        return torch.zeros(len(tokens) - 1, 0)

    def laws(
        self, tokens: list[int], features: torch.Tensor, paths: list[list[int]], committed: int
    ) -> list[torch.Tensor]:
        said = [self.draft(torch.tensor([[*tokens, *path]]), use_cache=False).logits[0, -1] for path in paths]
        return [logits[:VOCAB].softmax(-1) for logits in said]

    @cached_property
    def expected(self) -> list[list[int]]:
        """The greedy texts after `some_prompts`."""
        settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 30}
        prompts = [torch.tensor([prompt]) for prompt in some_prompts()]
        found = [self.target.generate(one, attention_mask=torch.ones_like(one), **settings) for one in prompts]
        return [text[0, prompt.shape[1] :].tolist() for text, prompt in zip(found, prompts, strict=True)]


def hybrid(kind: str, folder: Path) -> Hybrid:
    layers = {"num_hidden_layers": 3, "initializer_range": 0.3, "max_position_embeddings": 512, **LAYERS[kind]}
    target = tiny_checkpoint(kind, folder / "target", **layers)
    draft = shutil.copytree(target, folder / "draft")
    noise = torch.Generator().manual_seed(1)
    weights = load_file(draft / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() > 1:
            weights[name] = weight + NOISE * weight.std() * torch.randn(weight.shape, generator=noise)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    bundle = export_pair(target, folder / "bundle", draft).bundle
    both = (AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32).eval() for one in (target, draft))
    return Hybrid(bundle, *both)


def some_prompts() -> list[list[int]]:
    """Prompts of all lengths, of which some begin like others."""
    choose = random.Random(3)
    beginning = [choose.randrange(VOCAB) for _ in range(190)]
    return [[*beginning[:length], choose.randrange(VOCAB)] for length in (0, 1, 40, 190, 70, 186, 5, 3)]
