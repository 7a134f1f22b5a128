"""An adapter is read as PEFT means it, and what cannot be computed beside the weights is refused by name."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from trt_spec.engines import Adapters, Product, RequestError
from trt_spec.runtime.memory.adapter_files import read_adapter

from ...kit.adapters import Adapted


@pytest.fixture(scope="module")
def room(adapted: Adapted) -> Adapters:
    model = AutoModelForCausalLM.from_pretrained(adapted.pair.checkpoint, dtype=torch.float32)
    modules = [(name, one) for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)]
    products = [Product(name, one.in_features, one.out_features) for name, one in modules if name != "lm_head"]
    return Adapters(2, 8, tuple(products))


@pytest.mark.parametrize("name", ["wide", "narrow"])
def test_it_adds_what_peft_adds_to_each_matrix(adapted: Adapted, room: Adapters, name: str) -> None:
    """With ranks and alphas of their own, and scaled by the root of the rank."""
    before = AutoModelForCausalLM.from_pretrained(adapted.pair.checkpoint, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(adapted.pair.checkpoint, dtype=torch.float32)
    after = PeftModel.from_pretrained(after, adapted.folders[name]).merge_and_unload()
    pairs = read_adapter(adapted.folders[name], room).pairs
    assert len(pairs) == {"wide": 14, "narrow": 4}[name]
    for product in room.products:
        weights = [model.get_submodule(product.name).weight for model in (before, after)]
        added = torch.zeros_like(weights[0])
        if product.name in pairs:
            down, up = pairs[product.name]
            added = up.T @ down
        torch.testing.assert_close(weights[0] + added, weights[1], rtol=0, atol=1e-5)


def changed(folder: Path, out: Path, tensors: Any = None, **settings: object) -> Path:
    copytree(folder, out)
    config = out / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    if tensors is not None:
        file = out / "adapter_model.safetensors"
        save_file(tensors(load_file(file)), file)
    return out


Q = "base_model.model.model.layers.0.self_attn.q_proj"
REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "DoRA": (r"scales the weights by direction \(DoRA\) \(use_dora\); merge it", {"use_dora": True}),
    "biases": (r"trains biases \(all\); merge it", {"bias": "all"}),
    "modules": ("has whole modules of its own", {"modules_to_save": ["lm_head"]}),
    "kind": ("is an adapter of the type PREFIX_TUNING, expected LORA", {"peft_type": "PREFIX_TUNING"}),
    "alpha": ("has lora_alpha 'x' and alpha_pattern .* expected numbers by names", {"lora_alpha": "x"}),
    "infinite alpha": ("has lora_alpha inf, expected a number", {"lora_alpha": float("inf")}),
    "large alpha": ("has NaN or infinite numbers at", {"lora_alpha": 1e300}),
    "pattern": ("expected numbers by names of modules", {"alpha_pattern": ["q_proj"]}),
    "expression": ("expected numbers by names of modules", {"alpha_pattern": {"(": 1}}),
    "repeated": ("repeats layers", {"layer_replication": [[0, 2]]}),
    "no rank": (
        r"has matrices \[0, 32\] and .* it belongs to another model",
        {"tensors": lambda own: own | {f"{Q}.lora_A.weight": torch.zeros(0, 32)}},
    ),
    "number": (
        r"has matrices \[\] and .* it belongs to another model",
        {"tensors": lambda own: own | {f"{Q}.lora_A.weight": torch.zeros(())}},
    ),
    "size": (
        r"adapter_model\.safetensors has [\d,]+ bytes, this bundle has room for adapters of",
        {"tensors": lambda own: own | {"base_model.model.large.lora_A.weight": torch.zeros(2**21)}},
    ),
    "embedding": (
        r"has base_model\.model\.model\.embed_tokens\.lora_embedding_A, expected lora_A and lora_B",
        {"tensors": lambda own: own | {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(2, 2)}},
    ),
    "unknown": (
        r"adapts lm_head, which this bundle has no room beside; it has for q_proj, k_proj",
        {"tensors": lambda own: own | {"base_model.model.lm_head.lora_A.weight": torch.zeros(2, 2)}},
    ),
    "half": (
        r"has lora_A of model\.layers\.0\.self_attn\.q_proj alone",
        {"tensors": lambda own: {name: one for name, one in own.items() if name != f"{Q}.lora_B.weight"}},
    ),
    "rank": (
        r"has rank 9 at .*q_proj, this bundle has room for 8; export it with --adapter-rank 9",
        {"tensors": lambda own: own | {f"{Q}.lora_A.weight": torch.zeros(9, 32)}},
    ),
    "shape": (
        r"has matrices \[2, 31\] and .* it belongs to another model",
        {"tensors": lambda own: own | {f"{Q}.lora_A.weight": torch.zeros(2, 31)}},
    ),
    "NaN": (
        "has NaN or infinite numbers at",
        {"tensors": lambda own: own | {f"{Q}.lora_A.weight": own[f"{Q}.lora_A.weight"] * torch.nan}},
    ),
    "nothing": ("adapts nothing", {"tensors": lambda own: {}}),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_by_name(adapted: Adapted, room: Adapters, tmp_path: Path, what: str) -> None:
    said, change = REFUSED[what]
    with pytest.raises(RequestError, match=said):
        read_adapter(changed(adapted.folders["narrow"], tmp_path / "changed", **change), room)


def test_files_that_are_damaged_or_missing_are_refused_by_name(
    adapted: Adapted, room: Adapters, tmp_path: Path
) -> None:
    folder = changed(adapted.folders["narrow"], tmp_path / "changed")
    weights, config = folder / "adapter_model.safetensors", folder / "adapter_config.json"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(RequestError, match=r"adapter_model\.safetensors is damaged"):
        read_adapter(folder, room)
    config.write_text("{")
    with pytest.raises(RequestError, match=r"adapter_config\.json is not JSON"):
        read_adapter(folder, room)
    weights.unlink()
    with pytest.raises(RequestError, match=r"has no adapter_model\.safetensors that can be read"):
        read_adapter(folder, room)
