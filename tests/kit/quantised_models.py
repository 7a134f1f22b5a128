"""Makers of checkpoints that are quantised already: each method, packed by its published format."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from .families import tiny_checkpoint
from .models import tiny_llama

Packed = tuple[dict[str, Tensor], Tensor]  # what a matrix is stored as, by endings, and the numbers that it means
GROUP = 16
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
NF4 = [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626]
NF4 += [0.7230, 1.0]  # rounded: a checkpoint carries its own table


def words_of(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> Tensor:
    """Pack `[R, C]` along the columns into words of 32 bits, one number at a time."""
    each = 32 // bits
    order = order or list(range(each))
    words = np.zeros((numbers.shape[0], numbers.shape[1] // each), dtype=np.uint32)
    for row, column in np.ndindex(words.shape):
        word = 0
        for place, which in enumerate(order):
            word |= int(numbers[row, column * each + which]) << (bits * place)
        words[row, column] = word
    return torch.from_numpy(words.view(np.int32).copy())


def affine(weight: Tensor, bits: int, group: int, symmetric: bool = False) -> tuple[np.ndarray, ...]:
    """Round `[N, K]` to unsigned numbers, with scales and zero points `[N, G]`, and give what they mean."""
    highest = 2**bits - 1
    numbers = np.zeros(weight.shape, dtype=np.int64)
    meant = np.zeros(weight.shape, dtype=np.float32)
    scales = np.zeros((weight.shape[0], weight.shape[1] // group), dtype=np.float32)
    zeros = np.zeros(scales.shape, dtype=np.int64)
    for n, g in np.ndindex(scales.shape):
        part = weight[n, g * group : (g + 1) * group].numpy()
        low, high = min(part.min(), 0.0), max(part.max(), 0.0)
        if symmetric:
            high = max(abs(low), high)
            low = -high
        scales[n, g] = np.float16((high - low) / highest)
        zeros[n, g] = (highest + 1) // 2 if symmetric else np.clip(round(-low / scales[n, g]), 1, highest)
        found = np.clip(np.round(part / scales[n, g]) + zeros[n, g], 0, highest)
        numbers[n, g * group : (g + 1) * group] = found
        meant[n, g * group : (g + 1) * group] = (found - zeros[n, g]) * scales[n, g]
    return numbers, scales, zeros, meant


def gptq_matrix(
    weight: Tensor, bits: int = 4, less: int = 1, shuffled: bool = False, group: int = GROUP, symmetric: bool = False
) -> Packed:
    rows = weight.shape[1]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3)) if shuffled else torch.arange(rows)
    group = rows if group == -1 else group
    numbers, scales, zeros, meant = affine(weight[:, order], bits, group, symmetric)
    back = torch.argsort(order)
    return {
        ".qweight": words_of(numbers[:, back], bits).T.contiguous(),
        ".qzeros": words_of(zeros.T - less, bits),
        ".scales": torch.from_numpy(scales.T.copy()).half(),
        ".g_idx": (torch.arange(rows) // group)[back].int(),
    }, torch.from_numpy(meant)[:, back]


def awq_matrix(weight: Tensor) -> Packed:
    numbers, scales, zeros, meant = affine(weight, 4, GROUP)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        ".qweight": words_of(numbers.T, 4, order),
        ".qzeros": words_of(zeros.T, 4, order),
        ".scales": torch.from_numpy(scales.T.copy()).half(),
    }, torch.from_numpy(meant)


def packed_matrix(weight: Tensor, bits: int = 4, symmetric: bool = True, group: int = GROUP) -> Packed:
    numbers, scales, zeros, meant = affine(weight, bits, group, symmetric)
    parts = {
        ".weight_packed": words_of(numbers, bits),
        ".weight_scale": torch.from_numpy(scales).half(),
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        parts[".weight_zero_point"] = words_of(zeros.T, bits).T.contiguous()
    return parts, torch.from_numpy(meant)


def int8_matrix(weight: Tensor) -> Packed:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    numbers = (weight / scales.float()).round().clamp(-127, 127)
    return {".weight": numbers.to(torch.int8), ".weight_scale": scales}, numbers * scales.float()


def fp8_rows(weight: Tensor) -> Packed:
    scales = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scales).to(torch.float8_e4m3fn)
    return {".weight": numbers, ".weight_scale": scales, ".input_scale": torch.ones(1)}, numbers.float() * scales


def fp8_groups(weight: Tensor) -> Packed:
    parts = weight.view(len(weight), -1, GROUP)
    scales = parts.abs().amax(-1) / 448
    numbers = (parts / scales[..., None]).to(torch.float8_e4m3fn)
    meant = (numbers.float() * scales[..., None]).view(weight.shape)
    return {".weight": numbers.view(weight.shape), ".weight_scale": scales}, meant


def fp8_blocks(weight: Tensor, rows: int = 24, columns: int = 16) -> Packed:
    """Blocks whose last ones are cut off, as 24 rows of 32 are."""
    scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    numbers, meant = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape)
    for place in np.ndindex(*scales.shape):
        part = tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, (rows, columns), strict=True))
        scales[place] = weight[part].abs().max() / 448
        numbers[part] = (weight[part] / scales[place]).to(torch.float8_e4m3fn)
        meant[part] = numbers[part].float() * scales[place]
    return {".weight": numbers, ".weight_scale_inv": scales}, meant


def fp8_tensor(weight: Tensor) -> Packed:
    scale = weight.abs().max() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {".weight": numbers, ".weight_scale_inv": scale, ".activation_scale": scale}, numbers.float() * scale


def nf4_matrix(weight: Tensor, nested: bool = False, kind: str = "nf4") -> Packed:
    table = torch.tensor(NF4) if kind == "nf4" else torch.tensor(E2M1) / 6
    flat, size = weight.flatten(), 64
    largest = flat.view(-1, size).abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "float32", "shape": list(weight.shape)}
    parts = {".weight.quant_map": table}
    if nested:
        offset = float(largest.mean())
        codes = torch.linspace(-1, 1, 256)
        scale = (largest - offset).abs().view(-1, 4).amax(1)  # for four blocks each
        nearest = ((largest - offset).view(-1, 4) / scale[:, None]).flatten()[:, None].sub(codes).abs().argmin(1)
        largest = codes[nearest] * scale.repeat_interleave(4) + offset
        parts |= {".weight.absmax": nearest.to(torch.uint8), ".weight.nested_absmax": scale}
        parts |= {".weight.nested_quant_map": codes}
        state |= {"nested_blocksize": 4, "nested_offset": offset, "nested_dtype": "float32"}
    else:
        parts[".weight.absmax"] = largest
    numbers = (flat.view(-1, size) / largest[:, None]).flatten()[:, None].sub(table).abs().argmin(1)
    parts[".weight"] = torch.tensor([[int(first) * 16 + int(second)] for first, second in numbers.view(-1, 2)]).byte()
    parts[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode())).byte()
    return parts, (table[numbers].view(-1, size) * largest[:, None]).view(weight.shape)


def bnb_int8_matrix(weight: Tensor) -> Packed:
    largest = weight.abs().amax(1)
    numbers = (weight / largest[:, None] * 127).round()
    parts = {".weight": numbers.to(torch.int8), ".SCB": largest, ".weight_format": torch.tensor(0).byte()}
    return parts, numbers * largest[:, None] / 127


def mxfp4_experts(weight: Tensor) -> Packed:
    """Experts `[E, K, N]`, stored with their columns as rows."""
    turned = weight.mT.contiguous()
    parts = turned.view(*turned.shape[:2], -1, 32)  # [E, N, K / 32, 32]
    exponents = (parts.abs().amax(-1) / 6).log2().ceil()
    numbers = (parts / exponents.exp2()[..., None])[..., None].sub(torch.tensor(E2M1)).abs().argmin(-1)
    meant = torch.tensor(E2M1)[numbers] * exponents.exp2()[..., None]
    blocks = numbers[..., 0::2] + 16 * numbers[..., 1::2]
    stored = {"_blocks": blocks.byte(), "_scales": (exponents + 127).byte()}
    return stored, meant.view_as(turned).mT.contiguous()


def e2m1_matrix(weight: Tensor, group: int, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Round `[N, K]` to numbers of four bits, two a byte, under scales `[N, G]`, and give what they mean."""
    parts = weight.view(len(weight), -1, group)
    numbers = (parts / scales[..., None])[..., None].sub(torch.tensor(E2M1)).abs().argmin(-1)
    meant = (torch.tensor(E2M1)[numbers] * scales[..., None]).view_as(weight)
    packed = torch.zeros(len(weight), weight.shape[1] // 2, dtype=torch.uint8)
    for n, k in np.ndindex(*packed.shape):
        low, high = numbers.view_as(weight)[n, 2 * k : 2 * k + 2].tolist()
        packed[n, k] = low + 16 * high
    return packed, meant


def nvfp4_matrix(weight: Tensor, divided: bool) -> Packed:
    whole = 448 * 6 / weight.abs().max()
    blocks = weight.view(len(weight), -1, 16)
    scales = (blocks.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    packed, meant = e2m1_matrix(weight, 16, scales.float() / whole)
    if divided:
        stored = {".weight_packed": packed, ".weight_global_scale": whole.view(1), ".input_global_scale": torch.ones(1)}
    else:
        stored = {".weight": packed, ".weight_scale_2": 1 / whole, ".input_scale": torch.ones(())}
    return stored | {".weight_scale": scales}, meant


def mxfp4_matrix(weight: Tensor) -> Packed:
    exponents = (weight.view(len(weight), -1, 32).abs().amax(-1) / 6).log2().ceil()
    packed, meant = e2m1_matrix(weight, 32, exponents.exp2())
    return {".weight_packed": packed, ".weight_scale": (exponents + 127).byte()}, meant


def modelopt_fp8(weight: Tensor) -> Packed:
    scale = weight.abs().max() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {".weight": numbers, ".weight_scale": scale, ".input_scale": scale}, numbers.float() * scale


def groups_of(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@dataclass(frozen=True)
class Kind:
    """A method with one of its settings."""

    settings: dict[str, Any]
    pack: Callable[[Tensor], Packed]
    words: str  # of the report
    family: str = "llama"


KINDS = {
    "fp8 blocks": Kind(
        {"quant_method": "fp8", "weight_block_size": [24, 16], "activation_scheme": "dynamic"},
        fp8_blocks,
        "fp8, 8 bits (E4M3), blocks of 24 × 16",
    ),
    "fp8 tensor": Kind({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor, "fp8, 8 bits (E4M3)"),
    "fp8 experts": Kind(
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        lambda weight: fp8_blocks(weight, 16),
        "fp8, 8 bits (E4M3), blocks of 16 × 16",
        "qwen3_moe",
    ),
    "mxfp4": Kind({"quant_method": "mxfp4"}, mxfp4_experts, "mxfp4, 4 bits (E2M1), groups of 32", "gpt_oss"),
    "compressed int4": Kind(
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        | groups_of(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True),
        packed_matrix,
        "compressed-tensors, 4 bits, groups of 16",
    ),
    "compressed int4 with zero points": Kind(
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        | groups_of(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False),
        lambda weight: packed_matrix(weight, symmetric=False),
        "compressed-tensors, 4 bits, groups of 16",
    ),
    "compressed int8": Kind(
        {"quant_method": "compressed-tensors", "format": "int-quantized"}
        | groups_of(num_bits=8, type="int", strategy="channel"),
        int8_matrix,
        "compressed-tensors, 8 bits, one scale a channel",
    ),
    "compressed int8 packed": Kind(
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        | groups_of(num_bits=8, type="int", strategy="group", group_size=GROUP),
        lambda weight: packed_matrix(weight, bits=8),
        "compressed-tensors, 8 bits, groups of 16",
    ),
    "compressed fp8": Kind(
        {"quant_method": "compressed-tensors", "format": "float-quantized"}
        | groups_of(num_bits=8, type="float", strategy="channel"),
        fp8_rows,
        "compressed-tensors, 8 bits (E4M3), one scale a channel",
    ),
    "compressed fp8 in groups": Kind(
        {"quant_method": "compressed-tensors", "format": "float-quantized"}
        | groups_of(num_bits=8, type="float", strategy="group", group_size=GROUP),
        fp8_groups,
        "compressed-tensors, 8 bits (E4M3), groups of 16",
    ),
    "compressed nvfp4": Kind(
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
        | groups_of(num_bits=4, type="float", strategy="tensor_group", group_size=16),
        lambda weight: nvfp4_matrix(weight, divided=True),
        "compressed-tensors, 4 bits (E2M1), groups of 16",
    ),
    "compressed mxfp4": Kind(
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
        | groups_of(num_bits=4, type="float", strategy="group", group_size=32),
        mxfp4_matrix,
        "compressed-tensors, 4 bits (E2M1), groups of 32",
    ),
    "modelopt nvfp4": Kind(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        | groups_of(num_bits=4, type="float", group_size=16, dynamic=False),
        lambda weight: nvfp4_matrix(weight, divided=False),
        "modelopt, 4 bits (E2M1), groups of 16",
    ),
    "modelopt fp8": Kind(
        {"quant_method": "modelopt", "quant_algo": "FP8"} | groups_of(num_bits=8, type="float", dynamic=False),
        modelopt_fp8,
        "modelopt, 8 bits (E4M3)",
    ),
    "gptq": Kind({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq_matrix, "gptq, 4 bits, groups of 16"),
    "gptq, symmetric": Kind(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True},
        lambda weight: gptq_matrix(weight, symmetric=True),
        "gptq, 4 bits, groups of 16",
    ),
    "gptq in another order": Kind(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda weight: gptq_matrix(weight, shuffled=True),
        "gptq, 4 bits, groups of 16, rows in another order",
    ),
    "gptq v2, 8 bits": Kind(
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq_matrix(weight, bits=8, less=0, group=-1),
        "gptq, 8 bits, one scale a channel",
    ),
    "awq": Kind(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
        awq_matrix,
        "awq, 4 bits, groups of 16",
    ),
    "nf4": Kind(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        nf4_matrix,
        "bitsandbytes, 4 bits (NF4)",
    ),
    "nf4 nested": Kind(
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        lambda weight: nf4_matrix(weight, nested=True),
        "bitsandbytes, 4 bits (NF4), scales in 8 bits",
    ),
    "fp4": Kind(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        lambda weight: nf4_matrix(weight, kind="fp4"),
        "bitsandbytes, 4 bits (FP4)",
    ),
    "bitsandbytes int8": Kind(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8_matrix, "bitsandbytes, 8 bits, one scale a row"
    ),
}


def write_quantised(kind: Kind, path: Path) -> tuple[Path, Any]:
    """Write a checkpoint whose matrices are quantised; returns transformers' model with the numbers that they mean."""
    checkpoint = tiny_llama(path / "quantised") if kind.family == "llama" else tiny_checkpoint(kind.family, path / "q")
    config = AutoConfig.from_pretrained(checkpoint)
    family, meant = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], quantise(kind, checkpoint)
    return checkpoint, family.from_pretrained(None, config=config, state_dict=meant, dtype=torch.float32).eval()


def quantise(kind: Kind, checkpoint: Path) -> dict[str, Tensor]:
    """Quantise the matrices of a checkpoint in its place; returns the numbers that they mean."""
    plain = load_file(checkpoint / "model.safetensors")
    stored, meant = {}, {}
    for name, weight in plain.items():
        experts = name.endswith(("gate_up_proj", "down_proj"))
        if experts if kind.family == "gpt_oss" else "_proj.weight" in name and "vis" not in name:  # no vision tower
            parts, meant[name] = kind.pack(weight)
            base = name if kind.family == "gpt_oss" else name.removesuffix(".weight")
            stored |= {base + ending: part.contiguous().clone() for ending, part in parts.items()}
        else:
            stored[name] = meant[name] = weight
    assert len(meant) == len(plain)
    save_file(stored, checkpoint / "model.safetensors")
    fields = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(fields | {"quantization_config": kind.settings}))
    return meant
