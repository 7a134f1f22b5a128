"""Models of recurrent layers and others, and rounds of all kinds after which a greedy text must be transformers'."""

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.snapshots import EVERY

from .bundles import export_pair
from .distributions import VOCAB
from .families import SINGLE_STEPS_DIFFER, tiny_checkpoint

NOISE = 0.03  # of a draft's weights, in standard deviations
ROWS = 3  # that decode together
LAYERS: dict[str, dict[str, Any]] = {  # recurrent ones on both sides of one that attends, or recurrent ones alone
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "kv_lora_rank": 28},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "sliding_window": None,  # transformers' own cache forgets where it stands if the first layer is recurrent
        "num_attention_heads": 2,
    },
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "zamba2": {"layers_block_type": ["hybrid", "linear_attention", "hybrid"], "num_mem_blocks": 1},
}
SHARED = (1, 5, 40, 150, 190)  # tokens with which prompts begin alike: of the longest a part is found again


def every_hybrid(*in_default_tier: str) -> pytest.MarkDecorator:
    kinds = [kind if kind in in_default_tier else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in LAYERS]
    return pytest.mark.parametrize("kind", kinds)


def tiny_hybrid(kind: str, path: Path, **settings: Any) -> Path:
    return tiny_checkpoint(kind, path, num_hidden_layers=3, initializer_range=0.3, **LAYERS[kind], **settings)


def some_prompts() -> list[list[int]]:
    """Prompts of all lengths, of which some begin like others."""
    choose = random.Random(3)
    beginning = [choose.randrange(VOCAB) for _ in range(190)]
    return [[*beginning[:length], choose.randrange(VOCAB)] for length in (0, 1, 40, 190, 70, 186, 5, 3)]


def expected_texts(target: Any) -> list[list[int]]:
    """What transformers' model says greedily after `some_prompts`."""
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": 30}
    settings["use_cache"] = target.config.model_type not in SINGLE_STEPS_DIFFER
    if padding := [*range(VOCAB, target.config.vocab_size)]:
        settings["suppress_tokens"] = padding
    prompts = [torch.tensor([prompt]) for prompt in some_prompts()]
    found = [target.generate(one, attention_mask=torch.ones_like(one), **settings) for one in prompts]
    return [text[0, prompt.shape[1] :].tolist() for text, prompt in zip(found, prompts, strict=True)]


def greedy_texts(
    bundle: Path, prompts: list[list[int]], choices: Sequence[tuple[str, int | str]], seed: int = 0, **options: Any
) -> list[list[int]]:
    """Decode greedily, in rounds of all kinds: requests join and leave, and change what they draft all the time."""
    choose = random.Random(seed)
    params = SamplingParams(max_new_tokens=30, ignore_eos=True)
    with Decoder.open(bundle, max_batch=ROWS, **options) as decoder:
        waiting, running = [*prompts], []
        while waiting or not all(request.finished for request in running):
            if waiting and choose.random() < 0.4:
                drafter, length = choose.choice(choices)
                running.append(decoder.submit(waiting.pop(0), params, drafter=drafter, draft_length=length))
            decoder.step()
            for request in running:
                if not request.finished and choose.random() < 0.6:
                    drafter, length = choose.choice(choices)
                    request.draft(length, drafter)
        if options.get("prefix_bytes"):
            assert decoder.prefixes.found_tokens >= EVERY
    return [list(request.output().token_ids) for request in running]


@dataclass(frozen=True)
class Hybrid:
    """A bundle of a recurrent target and a recurrent draft like it, and both in transformers."""

    bundle: Path
    target: Any
    draft: Any
    name: str = "model"

    def features(self, tokens: list[int]) -> torch.Tensor:
        return torch.zeros(len(tokens) - 1, 0)

    def distributions(
        self, tokens: list[int], features: torch.Tensor, paths: list[list[int]], committed: int
    ) -> list[torch.Tensor]:
        said = [self.draft(torch.tensor([[*tokens, *path]]), use_cache=False).logits[0, -1] for path in paths]
        return [logits[:VOCAB].softmax(-1) for logits in said]

    @cached_property
    def expected(self) -> list[list[int]]:
        """The greedy texts after `some_prompts`."""
        return expected_texts(self.target)


def hybrid(kind: str, folder: Path, **settings: Any) -> Hybrid:
    target = tiny_hybrid(kind, folder / "target", max_position_embeddings=512, **settings)
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
