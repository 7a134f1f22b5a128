"""Bundles of recurrent models for tests, and what transformers says of both."""

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from .bundles import export_pair
from .kit.hybrids import expected_texts, tiny_hybrid
from .kit.laws import VOCAB

NOISE = 0.03  # of a draft's weights, in standard deviations


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
        return expected_texts(self.target)


def hybrid(kind: str, folder: Path) -> Hybrid:
    target = tiny_hybrid(kind, folder / "target", max_position_embeddings=512)
    draft = shutil.copytree(target, folder / "draft")
    noise = torch.Generator().manual_seed(1)
    weights = load_file(draft / "model.safetensors")
    for name, weight in weights.items():
        if weight.dim() > 1 and name.endswith("weight"):
            weights[name] = weight + NOISE * weight.std() * torch.randn(weight.shape, generator=noise)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    bundle = export_pair(target, folder / "bundle", draft).bundle
    both = (AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32).eval() for one in (target, draft))
    return Hybrid(bundle, *both)
