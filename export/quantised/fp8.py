"""FP8: each number a byte (E4M3), with a scale for a block of rows and columns, for a row, or for the whole matrix."""

import torch
from torch import Tensor

from ...engines import ExportError
from .method import Centred, Method, Parts, Settings, powers_of_two, spread

SCALES = (".weight_scale_inv", ".weight_scale")  # both multiply, whatever the first is called
OF_ACTIVATIONS = frozenset({".input_scale", ".activation_scale", ".input_scale_ub", ".k_scale", ".v_scale"})


def matrix(parts: Parts, settings: Settings) -> Tensor:
    stored = parts[".weight"]
    if stored.dtype != torch.float8_e4m3fn:
        raise ExportError(f".weight is {stored.dtype} beside scales, expected float8_e4m3fn")
    scales = next(parts[ending] for ending in SCALES if ending in parts)
    block = settings.get("weight_block_size")
    return stored.float() * scales_of(scales, stored.shape, block)


def centred(parts: Parts, settings: Settings) -> Centred | None:
    scales = next(parts[ending] for ending in SCALES if ending in parts)
    return in_columns(parts[".weight"], scales, settings.get("weight_block_size"))


def in_columns(numbers: Tensor, scales: Tensor, block: list[int] | None) -> Centred | None:
    """Describe a matrix by a scale for each row and group of columns; None if its columns are in no such groups."""
    rows, columns = numbers.shape
    whole = scales.numel() == 1 or scales.shape in ((rows,), (rows, 1))
    group = columns if whole else block[1] if block else 0
    if not group or columns % group:
        return None
    wide = scales_of(scales, numbers.shape, block).expand(rows, columns)[:, ::group]
    return Centred(numbers, torch.zeros(wide.shape, dtype=torch.int8), wide, 8)


def scales_of(scales: Tensor, shape: torch.Size, block: list[int] | None) -> Tensor:
    """Give scales a shape that multiplies `[…, N, K]`."""
    if scales.dtype == torch.uint8:
        scales = powers_of_two(scales)
    scales = scales.float()
    if scales.numel() == 1:
        return scales.reshape(())
    if tuple(scales.shape) == (*shape[:-1], 1):
        return scales
    if tuple(scales.shape) == tuple(shape[:-1]):
        return scales[..., None]
    if not block:
        raise ExportError(f"the scales have the shape {list(scales.shape)} for a matrix {list(shape)}, and no blocks")
    return spread(scales, shape, (block[0], block[1]))


def words(settings: Settings) -> str:
    block = settings.get("weight_block_size")
    if block is None:
        return "8 bits (E4M3)"
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ExportError(f"weight_block_size is {block!r}, expected two sizes")
    return f"8 bits (E4M3), blocks of {block[0]} × {block[1]}"


FP8 = Method(
    needs=tuple(frozenset({".weight", scale}) for scale in SCALES),
    may_have=OF_ACTIVATIONS,
    matrix=matrix,
    words=words,
    centred=centred,
)
