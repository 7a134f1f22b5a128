"""Random LoRA adapters as PEFT writes them, and what the models that PEFT makes with them say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from .bundles import Pair

ROOM = {"adapters": 3, "adapter_rank": 8}


def adapter_of(base: Path, folder: Path, seed: int = 3, kind: Any = AutoModelForCausalLM, **settings: Any) -> Path:
    """Write a random adapter whose effect on the text is large."""
    model = kind.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(seed)
    fields = {"r": 4, "lora_alpha": 16, "task_type": "CAUSAL_LM"} | settings
    adapted = get_peft_model(model, LoraConfig(**fields))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name or ("modules_to_save" in name and weight.dim() > 1):
                weight.add_(torch.randn_like(weight) * 0.3)
    adapted.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Adapted:
    """A pair with room for adapters, and some of them by name."""

    pair: Pair
    folders: Mapping[str, Path]

    def said(self, name: str | None, ids: Sequence[int], tokens: int) -> tuple[int, ...]:
        """Return what transformers says with an adapter, greedily."""
        model = AutoModelForCausalLM.from_pretrained(self.pair.checkpoint, dtype=torch.float32).eval()
        if name is not None:
            model = PeftModel.from_pretrained(model, self.folders[name]).eval()
        given = torch.tensor([ids])
        asked = {"max_new_tokens": tokens, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        found = model.generate(input_ids=given, attention_mask=torch.ones_like(given), **asked)
        return tuple(found[0, len(ids) :].tolist())
