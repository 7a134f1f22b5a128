"""Heads for tests, in the formats in which people publish them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from trt_spec.export.kinds.dflash import Block, DFlash
from trt_spec.export.kinds.dspark import DSpark
from trt_spec.export.kinds.eagle3 import Eagle3, Parts, Wiring
from trt_spec.export.kinds.layers import LAYERS
from trt_spec.export.kinds.mtp import Mtp

LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "rope_parameters", "vocab_size", "attention_bias", "mlp_bias", "max_position_embeddings",
)  # fmt: skip


def fields_of_layers(theirs: Any) -> dict[str, Any]:
    found = {name: value for name in LAYER_FIELDS if (value := getattr(theirs, name, None)) is not None}
    found = {"num_attention_heads": 4, "num_key_value_heads": 2} | found  # a target may not attend
    return {"head_dim": theirs.hidden_size // found["num_attention_heads"]} | found


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
    mask: int | None = None,  # of P-EAGLE
    **fields: Any,
) -> Path:
    """Write a head of random weights for the Llama checkpoint `target`."""
    theirs = AutoConfig.from_pretrained(target).get_text_config()
    own = fields_of_layers(theirs)
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
        mask_token=mask,
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
    if mask is not None:
        written |= {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": mask}
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
    theirs = AutoConfig.from_pretrained(target).get_text_config()
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


def look_aheads(
    folder: Path, target: Path, count: int = 4, seed: int = 0, scale: float = 1.0, rank: int = 0, **fields: Any
) -> Path:
    """Write random look-ahead embeddings for the checkpoint `target`, as large as its own, and a LoRA of this rank."""
    model, generator = AutoModelForCausalLM.from_pretrained(target), torch.Generator().manual_seed(seed)
    embedding = model.get_input_embeddings().weight.detach().float()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {"look_aheads.weight": scale * embedding.std() * random(count, embedding.shape[1])}
    for name, layer in model.named_modules() if rank else ():
        if isinstance(layer, torch.nn.Linear) and ".layers." in name:
            tensors[f"lora.{name}.down"] = 0.3 * random(rank, layer.in_features)
            tensors[f"lora.{name}.up"] = 0.3 * random(layer.out_features, rank)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "pass", "num_look_aheads": count} | fields))
    save_file(tensors, folder / "model.safetensors")
    return folder


def mtp_head(
    folder: Path,
    target: Path,
    form: str = "speculators",  # or "qwen", in its names
    kind: str = "qwen3",
    seed: int = 0,
    scale: float = 0.1,
    **fields: Any,
) -> Path:
    """Write a layer of multi-token prediction of random weights for the Llama checkpoint `target`."""
    theirs = AutoConfig.from_pretrained(target).get_text_config()
    own = fields_of_layers(theirs)
    own |= {"num_hidden_layers": theirs.num_hidden_layers, "model_type": kind}
    names = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
    names |= {"post_norm": "final_layernorm"}
    written = {"speculators_model_type": "mtp", "transformer_layer_config": own, "num_nextn_predict_layers": 1}
    if form == "qwen":
        names = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"}
        written = own
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**own | {"num_hidden_layers": 1, "layer_types": None})
    head = Mtp(config, LAYERS[kind])
    tensors = {}
    for name, weight in head.layer.state_dict().items():
        part, _, rest = name.partition(".")
        inner, prefix = f"{names.get(part, part)}.{rest}".removeprefix("mtp_block."), "mtp_layers.0."
        if form == "qwen":
            prefix = "mtp." if part in names else "mtp.layers.0."
        random = 1 + 0.1 * torch.randn_like(weight) if "norm" in name else scale * torch.randn_like(weight)
        tensors[prefix + inner] = random.contiguous()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(written | fields))
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_mtp_layer(checkpoint: Path, seed: int = 0, scale: float = 0.1) -> Path:
    """Give a GLM-4-MoE checkpoint a layer of multi-token prediction behind its own, in the names of its authors."""
    file = checkpoint / "model.safetensors"
    tensors, config = load_file(file), AutoConfig.from_pretrained(checkpoint)
    last, behind = config.num_hidden_layers - 1, config.num_hidden_layers
    size, generator = config.hidden_size, torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator)

    prefix = f"model.layers.{behind}."
    for name in [name for name in tensors if name.startswith(f"model.layers.{last}.")]:
        own = tensors[name]
        tensors[name.replace(f"layers.{last}.", f"layers.{behind}.")] = own + 0.1 * random(*own.shape)
    tensors |= {f"{prefix}{norm}.weight": 1 + random(size) for norm in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{prefix}eh_proj.weight"] = random(size, 2 * size)
    tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    fields = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(fields | {"num_nextn_predict_layers": 1}))
    return checkpoint


def with_mtp_of_qwen(checkpoint: Path, seed: int = 0, scale: float = 0.1, fused: bool = False, **fields: Any) -> Path:
    """Give a checkpoint of Qwen3-Next or Qwen3.5 such a layer in its authors' names, like those of its own that attend.

    Its experts lie apart, or `fused` in one tensor.
    """
    file, generator = checkpoint / "model.safetensors", torch.Generator().manual_seed(seed)
    tensors, config = load_file(file), AutoConfig.from_pretrained(checkpoint).get_text_config()
    size, like = config.hidden_size, f".layers.{config.layer_types.index('full_attention')}."

    def random(*shape: int) -> torch.Tensor:
        return scale * torch.randn(*shape, generator=generator)

    for name in [name for name in tensors if like in name]:
        own = tensors[name]
        tensors[f"mtp.layers.0.{name.partition(like)[2]}"] = own + random(*own.shape)
    tensors |= {f"mtp.{norm}.weight": random(size) for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    tensors["mtp.fc.weight"] = random(size, 2 * size)
    if fused:
        experts = "mtp.layers.0.mlp.experts"
        parts = {
            part: torch.stack([tensors.pop(f"{experts}.{one}.{part}.weight") for one in range(config.num_experts)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{experts}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        tensors[f"{experts}.down_proj"] = parts["down_proj"]
    save_file(tensors, file, metadata={"format": "pt"})
    written = json.loads((checkpoint / "config.json").read_text())
    written.get("text_config", written).update(fields)
    (checkpoint / "config.json").write_text(json.dumps(written))
    return checkpoint


def dflash_head(
    folder: Path,
    target: Path,
    form: str = "speculators",  # or "authors"
    draft_vocab: int | None = None,
    read: tuple[int, ...] = (1, 2),
    size: int = 5,
    mask: int = 63,
    layers: int = 2,
    seed: int = 0,
    scale: float = 0.1,
    rank: int | None = None,  # of DSpark
    confidence: int | None = None,  # numbers that it reads; None: a hidden state and the token before, 0: there is none
    **fields: Any,
) -> Path:
    """Write a DFlash head of random weights for the Llama checkpoint `target`, or a DSpark head."""
    theirs = AutoConfig.from_pretrained(target).get_text_config()
    own = fields_of_layers(theirs)
    own |= {"num_hidden_layers": layers, "model_type": "qwen3"}
    vocab = theirs.vocab_size
    torch.manual_seed(seed)
    parts = AutoConfig.for_model(**own), len(read), theirs.hidden_size, draft_vocab or vocab, Block(size, mask, False)
    if rank is None:
        head = DFlash(*parts)
    else:
        reads = theirs.hidden_size + rank if confidence is None else confidence
        head = DSpark(*parts, rank=rank, confidence=reads)
        fields = {
            "markov_rank": rank, "markov_head_type": "vanilla", "enable_confidence_head": reads > 0,
            "confidence_head_with_markov": reads > theirs.hidden_size,
        } | fields  # fmt: skip
    tensors = {}
    for name, weight in head.state_dict().items():
        if name.startswith("embed_tokens") or (name.startswith("lm_head") and not draft_vocab):
            continue
        random = 1 + 0.1 * torch.randn_like(weight) if "norm" in name else scale * torch.randn_like(weight)
        tensors[name.removeprefix("encoder.")] = random.contiguous()
    if draft_vocab:
        chosen = torch.randperm(vocab)[:draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).scatter_(0, chosen, True)
    written: dict[str, Any] = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "transformer_layer_config": own,
        "draft_vocab_size": draft_vocab or vocab,
        "block_size": size,
        "aux_hidden_state_layer_ids": list(read),
        "mask_token_id": mask,
        "sample_from_anchor": False,
    }
    if rank is not None:
        written |= {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"]}
        del written["sample_from_anchor"]  # unless it is said, the anchor speaks
    theirs_too = {"mask_token_id": mask, "target_layer_ids": [layer - 1 for layer in read]}
    if form == "authors" and rank is None:
        written = own | {"architectures": ["DFlashDraftModel"], "block_size": size, "auto_map": {"AutoModel": "d.D"}}
        written["dflash_config"] = theirs_too
    elif form == "authors":
        written = own | {"architectures": ["Qwen3DSparkModel"], "block_size": size, "num_anchors": 512} | theirs_too
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(written | fields))
    save_file(tensors, folder / "model.safetensors")
    return folder
