"""Grows a head with its target, so that it says what the small one says of the small target.

The hidden states of a grown target are those of the small one beside zeros, and so are those of its head. The head's
numbers of heads, key-value heads and inner dimensions grow as those of its target do.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ...engines.errors import RequestError
from ...export.kinds import open_any
from ...export.kinds.look_aheads import WEIGHT
from ..making.growing import Growth, LlamaSize, parts_of

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER = re.compile(r"(midlayer\.|layers\.(\d+)\.).*")
PROJECTION = re.compile(r"lm_heads\.\d+\.weight|(medusa_head\.)?\d+\.\d+\.weight")

Tensors = Mapping[str, Tensor]
Fields = Mapping[str, Any]  # of a config.json
Grown = tuple[dict[str, Tensor], dict[str, Any]]


def grow_head(source: Path, out: Path, old: LlamaSize, new: LlamaSize, dtype: torch.dtype = torch.float32) -> int:
    """Write the head `source`, whose target grows from `old` to `new`, into `out`; return its number of parameters."""
    opened = open_any(source)
    if opened is None or opened[0] not in KINDS:
        found = "no head" if opened is None else f"a head of the kind {opened[0]}"
        raise RequestError(f"{source} is {found}, only those of the kinds {', '.join(KINDS)} can be grown")
    kind, head = opened
    tensors = head.tensors()
    grown, fields = KINDS[kind](tensors, head.fields, old, new)
    if left := sorted(set(tensors) - set(grown)):
        raise RequestError(f"head {source} has the tensor {left[0]}, which cannot be grown; take a plainer head")
    grown = {name: weight.to(dtype) if weight.is_floating_point() else weight for name, weight in grown.items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(grown, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(fields | {"dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n")
    return sum(weight.numel() for weight in grown.values() if weight.is_floating_point())


def grow_eagle3(tensors: Tensors, fields: Fields, old: LlamaSize, new: LlamaSize) -> Grown:
    inner = dict(fields.get("transformer_layer_config") or fields)
    own = LlamaSize.of({"num_hidden_layers": 1} | inner)
    growth = Growth(own, like_its_target(own, old, new), inner["head_dim"])
    inputs = tensors["fc.weight"].shape[1] // old.hidden
    makes: dict[str, Callable[[Tensor], Tensor]] = {
        "fc.weight": lambda weight: growth.writing(growth.reading(weight, inputs=inputs)),
        "fc.bias": growth.writing,
        "input_norm.weight": lambda weight: torch.cat(list(map(growth.norm, weight.chunk(inputs)))),
        "norm.weight": growth.norm,
        "lm_head.weight": growth.reading,
        "embed_tokens.weight": lambda weight: growth.writing(weight.t()).t().contiguous(),
    }
    makes |= {f"fc_norm.{place}.weight": growth.norm for place in range(inputs)}
    grown = {name: make(tensors[name]) for name, make in makes.items() if name in tensors}
    grown |= {name: tensors[name] for name in ("d2t", "t2d") if name in tensors}
    for prefix, number in sorted({(found[1], found[2]) for name in tensors if (found := LAYER.fullmatch(name))}):
        parts, first = parts_of(tensors, prefix), number in (None, "0")
        layer = growth.layer(parts, inputs=2 if first else 1)
        if first:
            layer["hidden_norm.weight"] = growth.norm(parts["hidden_norm.weight"])
        grown |= {f"{prefix}{part}": weight for part, weight in layer.items()}
    inner |= growth.new.fields | {"rms_norm_eps": inner["rms_norm_eps"] * old.hidden / new.hidden}
    written = dict(fields) | ({"transformer_layer_config": inner} if "transformer_layer_config" in fields else inner)
    if "target_hidden_size" in fields:
        written["target_hidden_size"] = new.hidden
    if inputs == 3 and LAYER_IDS not in {**fields, **(fields.get("eagle_config") or {})}:
        written[LAYER_IDS] = [2, old.layers // 2, old.layers - 3]  # those of the small target, which nobody says
    return grown, written


def grow_medusa(tensors: Tensors, fields: Fields, old: LlamaSize, new: LlamaSize) -> Grown:
    growth, grown = Growth(old, new, 1), dict[str, Tensor]()
    for name, weight in tensors.items():
        if PROJECTION.fullmatch(name):
            grown[name] = growth.reading(weight)
        else:
            grown[name] = growth.writing(growth.reading(weight) if weight.ndim == 2 else weight)
    sizes = {name: new.hidden for name in ("hidden_size", "medusa_hidden_size") if name in fields}
    return grown, dict(fields) | sizes


def grow_blockwise(tensors: Tensors, fields: Fields, old: LlamaSize, new: LlamaSize) -> Grown:
    growth, grown = Growth(old, new, 1), dict[str, Tensor]()
    inner = tensors["blocks.0.up.weight"].shape[0]
    more = inner * new.mlp // old.mlp - inner  # inner dimensions, which are zero
    for name, weight in tensors.items():
        if ".up." in name:
            own = growth.reading(weight) if weight.ndim == 2 else weight.float()
            grown[name] = torch.cat([own, own.new_zeros(more, *own.shape[1:])])
        else:
            own = growth.writing(weight)
            grown[name] = own if weight.ndim == 1 else torch.cat([own, growth.noise(new.hidden, more)], 1)
    return grown, dict(fields) | {"blockwise_inner_size": inner + more}


def grow_look_aheads(tensors: Tensors, fields: Fields, old: LlamaSize, new: LlamaSize) -> Grown:
    growth = Growth(old, new, 1)
    return {WEIGHT: growth.writing(tensors[WEIGHT].t()).t().contiguous()}, dict(fields)


def like_its_target(own: LlamaSize, old: LlamaSize, new: LlamaSize) -> LlamaSize:
    """Return the size of a head that grows as its target does; it keeps its layers."""
    if own.hidden != old.hidden:
        raise RequestError(
            f"the head has {own.hidden} channels and its target {old.hidden}; only heads of the same width can be grown"
        )
    return LlamaSize(
        new.hidden,
        own.layers,
        own.heads * new.heads // old.heads,
        own.kv_heads * new.kv_heads // old.kv_heads,
        own.mlp * new.mlp // old.mlp,
    )


KINDS: dict[str, Callable[[Tensors, Fields, LlamaSize, LlamaSize], Grown]] = {
    "eagle3": grow_eagle3,
    "medusa": grow_medusa,
    "blockwise": grow_blockwise,
    "pass": grow_look_aheads,
}
