"""compressed-tensors: whole numbers, packed or a byte each, FP8 or FP4; scales for tensors, rows, groups or blocks."""

from typing import Any

import torch
from torch import Tensor

from ...engines import ExportError
from . import nvfp4
from .fp8 import OF_ACTIVATIONS, in_columns, scales_of
from .method import Centred, Method, Parts, Settings, in_groups, powers_of_two, refuse_shape, unpack
from .mxfp4 import halves

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mixed-precision",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)
PACKED_BITS = (4, 8)
FLOATS: dict[Any, str] = {4: "E2M1", 8: "E4M3"}
DIVISOR = ".weight_global_scale"  # of NVFP4: what its scales are to be divided by


def matrix(parts: Parts, settings: Settings) -> Tensor:
    scales, zeros = parts[".weight_scale"], parts.get(".weight_zero_point")
    if ".weight_packed" in parts and ".weight_shape" not in parts and (zeros is not None or ".weight_g_idx" in parts):
        raise ExportError("it has zero points or groups in another order, which FP4 has not")
    if DIVISOR in parts:
        return nvfp4.matrix(parts[".weight_packed"], scales, 1 / parts[DIVISOR].float())
    if ".weight_packed" in parts and ".weight_shape" not in parts:
        numbers, scales = _mxfp4(parts[".weight_packed"], scales)
    elif ".weight_packed" in parts:
        numbers, zeros = _unpacked(parts, zeros)
    else:
        stored = parts[".weight"]
        if stored.dtype not in (torch.int8, torch.float8_e4m3fn):
            raise ExportError(f".weight is {stored.dtype} beside scales, expected int8 or float8_e4m3fn")
        numbers = stored.float()
    if zeros is not None and bool(zeros.any()):
        numbers -= _spread(zeros, numbers.shape, parts, settings)
    return numbers.mul_(_spread(scales, numbers.shape, parts, settings))


def centred(parts: Parts, settings: Settings) -> Centred | None:
    if DIVISOR in parts:
        return nvfp4.centred(parts[".weight_packed"], parts[".weight_scale"], 1 / parts[DIVISOR].float())
    if ".weight_packed" in parts and ".weight_shape" not in parts:
        return None
    scales, zeros = parts[".weight_scale"].float(), parts.get(".weight_zero_point")
    if ".weight_packed" in parts:
        numbers, zeros = _unpacked(parts, zeros)
        bits = PACKED_BITS[parts[".weight_packed"].shape[1] * 4 >= numbers.shape[1]]
        numbers = numbers.to(torch.int8)
    else:
        numbers, bits = parts[".weight"], 8
    zeros = torch.zeros_like(scales) if zeros is None else zeros.float()
    if numbers.dtype != torch.int8 and bool(zeros.any()):
        return None
    grouped = scales.ndim == 2 and len(scales) == len(numbers) and numbers.shape[1] % scales.shape[1] == 0
    if numbers.dtype != torch.int8 and not grouped:
        return in_columns(numbers, scales, _block_of(settings))
    if not grouped or ".weight_g_idx" in parts or zeros.shape != scales.shape:
        return None
    return Centred(numbers, zeros.to(torch.int8), scales, bits)


def _mxfp4(packed: Tensor, exponents: Tensor) -> tuple[Tensor, Tensor]:
    if packed.dtype != torch.uint8 or exponents.dtype != torch.uint8:
        raise ExportError(f".weight_shape is not there, and {packed.dtype} with scales {exponents.dtype} is not FP4")
    return halves(packed).flatten(1), powers_of_two(exponents)


def _unpacked(parts: Parts, zeros: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Unpack a matrix `[N, K]` and its zero points `[N, G]`, which are packed along the rows."""
    packed = parts[".weight_packed"]
    rows, columns = parts[".weight_shape"].tolist()
    bits = next((bits for bits in PACKED_BITS if packed.shape == (rows, -(-columns * bits // 32))), None)
    if bits is None:
        raise ExportError(
            f".weight_packed has the shape {list(packed.shape)} for a matrix {[rows, columns]}, "
            f"expected numbers of {' or '.join(map(str, PACKED_BITS))} bits"
        )
    middle = 1 << (bits - 1)
    numbers = unpack(packed, bits)[:, :columns].float() - middle
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = unpack(zeros.T, bits).T[:rows].float() - middle
    return numbers, zeros


def _spread(scales: Tensor, shape: torch.Size, parts: Parts, settings: Settings) -> Tensor:
    """Give scales, or zero points, a shape that multiplies `[N, K]`."""
    block = _block_of(settings)
    if block or scales.ndim != 2 or scales.shape[1] == 1:
        return scales_of(scales, shape, block)
    groups = scales.shape[1]
    refuse_shape(scales, (shape[0], groups), ".weight_scale")
    if ".weight_g_idx" in parts:
        return scales.float()[:, parts[".weight_g_idx"].long()]
    if shape[1] % groups:
        raise ExportError(f".weight_scale has {groups} groups, which do not divide {shape[1]} columns")
    return scales.float().repeat_interleave(shape[1] // groups, 1)


def _block_of(settings: Settings) -> list[int] | None:
    return next((block for weights in _weights_of(settings) if (block := weights.get("block_structure"))), None)


def _weights_of(settings: Settings) -> list[dict[str, Any]]:
    groups = settings.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, dict) else []
    schemes = [scheme for scheme in schemes if not isinstance(scheme, dict) or scheme.get("weights") is not None]
    if not schemes or not all(
        isinstance(scheme, dict) and isinstance(scheme.get("weights"), dict) for scheme in schemes
    ):
        raise ExportError("config_groups lacks the settings of weights, expected them for each group")
    return [scheme["weights"] for scheme in schemes]


def words(settings: Settings) -> str:
    formats = {settings.get("format"), *(scheme.get("format") for scheme in settings.get("config_groups", {}).values())}
    if other := sorted(map(str, formats - {None, *FORMATS})):
        raise ExportError(f"format is {other[0]}, expected {', '.join(FORMATS)}")
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise ExportError(f"its zeros are left out (sparsity_config {sparsity}), expected all numbers")
    if settings.get("transform_config"):
        raise ExportError("its weights are rotated (transform_config), expected them as they are")
    blocks = {str(weights.get("block_structure")) for weights in _weights_of(settings)}
    if len(blocks) > 1:
        raise ExportError("config_groups have different blocks, expected one size")
    return " and ".join(dict.fromkeys(map(_scheme, _weights_of(settings))))


def _scheme(weights: dict[str, Any]) -> str:
    bits, kind, strategy = (weights.get(name) for name in ("num_bits", "type", "strategy"))
    words = f"{bits} bits{f' ({FLOATS.get(bits)})' if kind == 'float' else ''}"
    if weights.get("group_size"):
        return f"{words}, {in_groups(weights['group_size'])}"
    return f"{words}, one scale a {strategy}" if strategy else words


COMPRESSED_TENSORS = Method(
    needs=(
        frozenset({".weight_packed", ".weight_scale", ".weight_shape"}),
        frozenset({".weight_packed", ".weight_scale", DIVISOR}),
        frozenset({".weight_packed", ".weight_scale"}),
        frozenset({".weight", ".weight_scale"}),
    ),
    may_have=OF_ACTIVATIONS
    | {".weight_zero_point", ".weight_g_idx", ".input_zero_point", ".output_scale", ".output_zero_point"}
    | {".input_global_scale"},
    matrix=matrix,
    words=words,
    centred=centred,
)
