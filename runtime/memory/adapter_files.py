"""Reads a LoRA adapter as PEFT writes it, for the products that a graph can adapt."""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from math import sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ...engines import Adapters, Product, RequestError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
# What an adapter may have beside two narrow matrices, and what that means here.
REFUSED = {
    "use_dora": "scales the weights by direction (DoRA)",
    "modules_to_save": "has whole modules of its own",
    "trainable_token_indices": "has embeddings of its own",
    "lora_bias": "has biases of its own",
    "alora_invocation_tokens": "begins at certain tokens (aLoRA)",
    "megatron_config": "is split as Megatron splits models",
}
Pair = tuple[Tensor, Tensor]  # [rank, inputs] and [rank, outputs], the second scaled


class Read(NamedTuple):
    """An adapter that was read, and a hash of all that it is."""

    pairs: dict[str, Pair]  # by the name of the product
    digest: str


def read_adapter(folder: Path, room: Adapters) -> Read:
    """Read an adapter, or refuse it by the name of what does not fit."""
    config, weights = _files(folder)
    fields = _settings(folder, config)
    try:
        tensors = load(weights)
    except SafetensorError as error:
        raise RequestError(f"{folder / WEIGHTS} is damaged ({error}); save the adapter again") from error
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        matched = NAME.fullmatch(name)
        if matched is None:
            raise RequestError(
                f"adapter {folder} has {name}, expected lora_A and lora_B of linear layers alone; merge it with "
                "export-models --lora"
            )
        found.setdefault(matched[1], {})[matched[2]] = tensor
    pairs = {}
    for name, own in found.items():
        product = _product(folder, name, room)
        pairs[product.name] = _pair(folder, product, own, fields, room.rank)
    if not pairs:
        raise RequestError(f"adapter {folder} adapts nothing; expected lora_A and lora_B of some layer")
    return Read(pairs, sha256(config + weights).hexdigest())


def _product(folder: Path, name: str, room: Adapters) -> Product:
    """Return the product of a module; the decoder of an encoder–decoder is a part of what the bundle names."""
    for one in room.products:
        if one.name == name or one.name.endswith(f".{name}"):
            return one
    kinds = ", ".join(dict.fromkeys(one.name.rpartition(".")[2] for one in room.products)) or "no layer"
    raise RequestError(f"adapter {folder} adapts {name}, which this bundle has no room beside; it has for {kinds}")


def _files(folder: Path) -> tuple[bytes, bytes]:
    found = []
    for name in (CONFIG, WEIGHTS):
        try:
            found.append((folder / name).read_bytes())
        except OSError as error:
            raise RequestError(
                f"{folder} has no {name} that can be read ({error.strerror}), expected a LoRA adapter as PEFT writes it"
            ) from error
    return found[0], found[1]


def _settings(folder: Path, config: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(config)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{folder / CONFIG} is not JSON ({error}); save the adapter again") from error
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        kind = fields.get("peft_type") if isinstance(fields, dict) else fields
        raise RequestError(f"{folder} is an adapter of the type {kind}, expected LORA")
    for name, why in REFUSED.items():
        if fields.get(name):
            raise RequestError(f"adapter {folder} {why} ({name}); merge it with export-models --lora")
    if fields.get("bias", "none") != "none":
        raise RequestError(f"adapter {folder} trains biases ({fields['bias']}); merge it with export-models --lora")
    return fields


def _pair(folder: Path, product: Product, own: Mapping[str, Tensor], fields: dict[str, Any], most: int) -> Pair:
    if own.keys() != {"A", "B"}:
        raise RequestError(f"adapter {folder} has lora_{next(iter(own))} of {product.name} alone; save it again")
    down, up = own["A"].float(), own["B"].float()
    rank = len(down)
    if rank > most:
        raise RequestError(
            f"adapter {folder} has rank {rank} at {product.name}, this bundle has room for {most}; export it with "
            f"--adapter-rank {rank}"
        )
    if down.shape != (rank, product.inputs) or up.shape != (product.outputs, rank):
        raise RequestError(
            f"adapter {folder} has matrices {list(down.shape)} and {list(up.shape)} of {product.name}, expected "
            f"{[rank, product.inputs]} and {[product.outputs, rank]}; it belongs to another model"
        )
    if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
        raise RequestError(f"adapter {folder} has NaN or infinite numbers at {product.name}; train it again")
    alpha = _of_module(fields.get("alpha_pattern") or {}, product.name, fields.get("lora_alpha", rank))
    if not isinstance(alpha, int | float):
        raise RequestError(f"{folder / CONFIG} has lora_alpha {alpha!r}, expected a number")
    scale = alpha / sqrt(rank) if fields.get("use_rslora") else alpha / rank
    return down, (up * scale).T.contiguous()


def _of_module(pattern: Mapping[str, Any], module: str, usual: Any) -> Any:
    """Return what a pattern of PEFT's says of a module: the first of its keys that names the module's end."""
    return next((value for key, value in pattern.items() if re.fullmatch(rf"(.*\.)?({key})", module)), usual)
