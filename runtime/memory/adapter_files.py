"""Reads a LoRA adapter as PEFT writes it, for the products that a graph can adapt."""

import json
import re
from collections.abc import Mapping
from hashlib import sha256
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from ...engines import Adapters, Product, RequestError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
OF_WHOLE = re.compile(r"\b(language_model|text_model)\.")  # what the text model is called in a whole that reads more
# What an adapter may have beside two narrow matrices, and what that means here.
REFUSED = {
    "use_dora": "scales the weights by direction (DoRA)",
    "modules_to_save": "has whole modules of its own",
    "trainable_token_indices": "has embeddings of its own",
    "lora_bias": "has biases of its own",
    "alora_invocation_tokens": "begins at certain tokens (aLoRA)",
    "megatron_config": "is split as Megatron splits models",
    "layer_replication": "repeats layers",
    "use_bdlora": "has matrices in blocks (BD-LoRA)",
    "arrow_config": "chooses among adapters by token (Arrow)",
}
# How training began may have changed the weights of the base model: not by these ways.
BEGUN_BESIDE = (True, False, None, "gaussian", "eva", "orthogonal")
USUAL = {"r": 8, "lora_alpha": 8}  # PEFT's, where a file has none
SPARE_BYTES = 2**20  # for names and settings
Pair = tuple[Tensor, Tensor]  # [rank, inputs] and [rank, outputs], the second scaled


class Read(NamedTuple):
    """An adapter that was read, and a hash of all that it is."""

    pairs: dict[str, Pair]  # by the name of the product
    digest: str


def read_adapter(folder: Path, room: Adapters, dtype: torch.dtype = torch.float32) -> Read:
    """Read an adapter in this type, or refuse it by the name of what does not fit."""
    config, weights = _files(folder, 2 * room.bytes_each(4) + SPARE_BYTES)
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
        if product.name in pairs:
            raise RequestError(f"adapter {folder} adapts {product.name} under two names, one is {name}; save it again")
        pairs[product.name] = _pair(folder, name, product, own, fields, room.rank, dtype)
    if not pairs:
        raise RequestError(f"adapter {folder} adapts nothing; expected lora_A and lora_B of some layer")
    return Read(pairs, sha256(config + weights).hexdigest())


def _product(folder: Path, name: str, room: Adapters) -> Product:
    """Return the product of a module; the decoder of an encoder–decoder is a part of what the bundle names.

    A text model that sees was a part of what the adapter names.
    """
    own = OF_WHOLE.sub("", name)
    named = [one for one in room.products if f".{one.name}".endswith(f".{own}")]
    found = [one for one in named if one.name == own] or named
    if len(found) > 1:
        raise RequestError(f"adapter {folder} adapts {name}, which may be {found[0].name} or {found[1].name}")
    if found:
        return found[0]
    kinds = ", ".join(dict.fromkeys(one.name.rpartition(".")[2] for one in room.products)) or "no layer"
    raise RequestError(f"adapter {folder} adapts {name}, which this bundle has no room beside; it has for {kinds}")


def _files(folder: Path, most: int) -> tuple[bytes, bytes]:
    found = []
    for name in (CONFIG, WEIGHTS):
        file = folder / name
        try:
            if file.exists() and not file.is_file():
                raise OSError(0, "it is no file")
            if (size := file.stat().st_size) > most:
                raise RequestError(f"{file} has {size:,} bytes, this bundle has room for adapters of {most:,} at most")
            found.append(file.read_bytes())
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
    if (begun := fields.get("init_lora_weights", True)) not in BEGUN_BESIDE or fields.get("kasa_config") is not None:
        raise RequestError(
            f"adapter {folder} changes the weights of its base model (init_lora_weights {begun!r}, kasa_config "
            f"{fields.get('kasa_config')!r}); merge it with export-models --lora"
        )
    return fields


def _pair(
    folder: Path,
    name: str,
    product: Product,
    own: Mapping[str, Tensor],
    fields: dict[str, Any],
    most: int,
    dtype: torch.dtype,
) -> Pair:
    if own.keys() != {"A", "B"}:
        raise RequestError(f"adapter {folder} has lora_{next(iter(own))} of {product.name} alone; save it again")
    down, up = own["A"].float(), own["B"].float()
    rank = len(down) if down.dim() == 2 else 0
    if rank > most:
        raise RequestError(
            f"adapter {folder} has rank {rank} at {product.name}, this bundle has room for {most}; export it with "
            f"--adapter-rank {rank}"
        )
    if not rank or down.shape != (rank, product.inputs) or up.shape != (product.outputs, rank):
        raise RequestError(
            f"adapter {folder} has matrices {list(down.shape)} and {list(up.shape)} of {product.name}, expected "
            f"{[rank, product.inputs]} and {[product.outputs, rank]}; it belongs to another model"
        )
    if (said := _number(folder, name, fields, "r", "rank_pattern")) != rank:
        raise RequestError(
            f"adapter {folder} has rank {rank} at {product.name}, its {CONFIG} says {said:g}; save it again"
        )
    alpha = _number(folder, name, fields, "lora_alpha", "alpha_pattern")
    scale = alpha / sqrt(rank) if fields.get("use_rslora") else alpha / rank
    pair = down.to(dtype), (up * scale).T.contiguous().to(dtype)
    if not all(bool(torch.isfinite(one).all()) for one in pair):  # as they are stored
        raise RequestError(f"adapter {folder} has NaN or infinite numbers at {product.name}; train it again")
    return pair


def _number(folder: Path, module: str, fields: dict[str, Any], name: str, of_pattern: str) -> float:
    """Return the rank or alpha of a module, called as the adapter calls it.

    It is that of the first key of PEFT's pattern that names its end, or that of all.
    """
    pattern = fields.get(of_pattern) or {}
    try:
        found = [value for key, value in pattern.items() if re.fullmatch(rf"(.*\.)?({key})", module)]
        number = float([*found, fields.get(name, USUAL[name])][0])
    except (AttributeError, TypeError, ValueError, OverflowError, re.error) as error:
        raise RequestError(
            f"{folder / CONFIG} has {name} {fields.get(name)!r} and {of_pattern} {pattern!r}, expected "
            f"numbers by names of modules ({error})"
        ) from error
    if not isfinite(number):
        raise RequestError(f"{folder / CONFIG} has {name} {number!r}, expected a number")
    return number
