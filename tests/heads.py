"""Heads for tests, in the formats in which people publish them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig
from trt_spec.export.kinds.eagle3 import Eagle3, Parts, Wiring

LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_parameters", "vocab_size", "attention_bias", "mlp_bias", "max_position_embeddings",
)  # fmt: skip


def eagle3_head(
    folder: Path,
    target: Path,
    draft_vocab: int | None = None,
    form: str = "speculators",
    layers: int = 1,
    kind: str = "llama",
    read: tuple[int, ...] = (0, 1, 2),
    seed: int = 0,
    scale: float = 0.05,
    own_embedding: bool = False,
    norms: str = "",  # "input" or "each"
    bias: bool = False,
    **fields: Any,
) -> Path:
    """Write a head of random weights for the Llama checkpoint `target`."""
    theirs = AutoConfig.from_pretrained(target)
    own = {name: value for name in LAYER_FIELDS if (value := getattr(theirs, name, None)) is not None}
    own |= {"num_hidden_layers": layers, "model_type": kind}
    config = AutoConfig.for_model(**own)
    vocab = theirs.vocab_size
    parts = Parts(
        target_hidden=theirs.hidden_size,
        inputs=len(read),
        draft_vocab=draft_vocab or vocab,
        fc_bias=bias,
        norm_before_fc=norms == "input",
        fc_norm=norms == "each",
    )
    torch.manual_seed(seed)
    head = Eagle3(config, parts, Wiring(read))
    tensors = {}
    for name, weight in head.state_dict().items():
        if name.startswith("embed_tokens") and not own_embedding:
            continue
        own_name = name.removeprefix("encoder.")
        if form == "original":
            own_name = own_name.replace("layers.0.", "midlayer.")
        random = 1 + 0.1 * torch.randn_like(weight) if "norm" in name else scale * torch.randn_like(weight)
        tensors[own_name] = random.contiguous()
    if draft_vocab:
        chosen = torch.randperm(vocab)[:draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).scatter_(0, chosen, True)
    head_fields: dict[str, Any] = {"draft_vocab_size": draft_vocab or vocab}
    if form == "original":
        written = own | {"architectures": ["LlamaForCausalLMEagle3"]} | head_fields
        written["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(read)}
    else:
        written = {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": own,
            "eagle_aux_hidden_state_layer_ids": list(read),
            "norm_before_fc": norms == "input",
            "fc_norm": norms == "each",
            **head_fields,
        }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(written | fields))
    save_file(tensors, folder / "model.safetensors")
    return folder


def parallel_heads(
    folder: Path,
    target: Path,
    kind: str,
    count: int = 3,
    layers: int = 1,
    form: str = "authors",
    own_projections: bool = True,
    seed: int = 0,
    scale: float = 0.1,
    **fields: Any,
) -> Path:
    """Write Medusa or blockwise heads of random weights for the Llama checkpoint `target`."""
    theirs = AutoConfig.from_pretrained(target)
    size, generator = theirs.hidden_size, torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator)

    tensors: dict[str, torch.Tensor] = {}
    for head in range(count):
        if kind == "blockwise":
            tensors |= {
                f"blocks.{head}.up.weight": random(2 * size, size),
                f"blocks.{head}.up.bias": random(2 * size),
                f"blocks.{head}.down.weight": random(size, 2 * size),
                f"blocks.{head}.down.bias": random(size),
            }
            continue
        for layer in range(layers):
            name = f"{head}.{layer}.linear" if form == "authors" else f"blocks.{head}.layers.{layer}"
            tensors |= {f"{name}.weight": random(size, size), f"{name}.bias": random(size)}
        if own_projections:
            name = f"{head}.{layers}" if form == "authors" else f"lm_heads.{head}"
            tensors[f"{name}.weight"] = random(theirs.vocab_size, size)
    written: dict[str, Any] = {"medusa_num_heads": count, "medusa_num_layers": layers}
    if kind == "blockwise":
        written = {"blockwise_inner_size": 2 * size, "num_heads": count}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(written | fields))
    save_file(tensors, folder / "model.safetensors")
    return folder
