"""An adapter is read as PEFT means it, and what cannot be computed beside the weights is refused by name."""

import json
from collections.abc import Collection
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

from ...kit.adapters import Adapted, adapter_of


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


def changed(folder: Path, out: Path, tensors: Any = None, without: Collection[str] = (), **settings: object) -> Path:
    copytree(folder, out)
    config = out / "adapter_config.json"
    fields = json.loads(config.read_text()) | settings
    config.write_text(json.dumps({name: field for name, field in fields.items() if name not in without}))
    if tensors is not None:
        file = out / "adapter_model.safetensors"
        save_file(tensors(load_file(file)), file)
    return out


@pytest.mark.parametrize("without", ["lora_alpha", "r", "use_rslora", "bias", "rank_pattern", "alpha_pattern"])
def test_what_a_file_lacks_is_as_peft_takes_it(adapted: Adapted, room: Adapters, tmp_path: Path, without: str) -> None:
    product = room.products[0]
    settings: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": [product.name.rpartition(".")[2]]}
    if without in ("lora_alpha", "use_rslora"):
        settings |= {"r": 4, "use_rslora": without == "use_rslora"}
    made = adapter_of(adapted.pair.checkpoint, tmp_path / "made", **settings)
    folder = changed(made, tmp_path / "changed", without=[without])
    before = AutoModelForCausalLM.from_pretrained(adapted.pair.checkpoint, dtype=torch.float32)
    weight = before.get_submodule(product.name).weight.detach().clone()
    after = PeftModel.from_pretrained(before, folder).merge_and_unload().get_submodule(product.name).weight
    down, up = read_adapter(folder, room).pairs[product.name]
    torch.testing.assert_close(weight + up.T @ down, after, rtol=0, atol=1e-5)


def test_a_pattern_names_modules_as_the_adapter_does(adapted: Adapted, room: Adapters, tmp_path: Path) -> None:
    """One that was trained on a model that sees calls its text model a part of the whole."""

    def part(own: Any) -> Any:
        return {name.replace("model.layers", "model.language_model.layers"): one for name, one in own.items()}

    folder = adapted.folders["narrow"]
    pattern = {r"^model\.language_model\.layers\.0\.self_attn\.q_proj": 1000}
    plain = read_adapter(changed(folder, tmp_path / "plain", part, alpha_pattern={}), room).pairs
    named = read_adapter(changed(folder, tmp_path / "named", part, alpha_pattern=pattern), room).pairs
    other = {name for name in plain if not torch.equal(plain[name][1], named[name][1])}
    assert other == {"model.layers.0.self_attn.q_proj"}


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
    "told rank": (r"has rank 4 at .*proj, its adapter_config\.json says 3; save it again", {"r": 3}),
    "untold rank": (r"has rank 4 at .*proj, its adapter_config\.json says 8", {"without": ["r"]}),
    "PiSSA": (r"changes the weights of its base model \(init_lora_weights 'pissa'", {"init_lora_weights": "pissa"}),
    "KaSA": ("changes the weights of its base model .*; merge it", {"kasa_config": {}}),
    "blocks": (r"has matrices in blocks \(BD-LoRA\) \(use_bdlora\)", {"use_bdlora": {"nblocks": 2}}),
    "twice": (
        r"adapts model\.layers\.0\.self_attn\.q_proj under two names, one is ",
        {
            "tensors": lambda own: (
                own
                | {
                    f"{Q}.lora_{one}.weight".replace("model.layers", "layers"): own[f"{Q}.lora_{one}.weight"].clone()
                    for one in "AB"
                }
            )
        },
    ),
    "short": (
        r"adapts self_attn\.q_proj, which may be model\.layers\.0\.self.* or model\.layers\.1\.self",
        {
            "tensors": lambda own: {
                f"base_model.model.self_attn.q_proj.lora_{one}.weight": own[f"{Q}.lora_{one}.weight"] for one in "AB"
            }
        },
    ),
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
