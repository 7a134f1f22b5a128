"""NVFP4: numbers of four bits (E2M1), two a byte, a scale of eight (E4M3) for each 16, and one float for these."""

import torch
from torch import Tensor

from ...engines import ExportError
from ..passes import nvfp4
from .method import Centred, refuse_shape
from .mxfp4 import halves

WORDS = f"4 bits (E2M1), groups of {nvfp4.BLOCK}"


def matrix(packed: Tensor, scales: Tensor, whole: Tensor) -> Tensor:
    found = centred(packed, scales, whole)
    wide = found.scales.float() * whole.float()
    return (found.numbers.float().view(*wide.shape, -1) * wide[..., None]).flatten(1)


def centred(packed: Tensor, scales: Tensor, whole: Tensor) -> Centred:
    if packed.dtype != torch.uint8 or scales.dtype != torch.float8_e4m3fn:
        raise ExportError(
            f"its numbers are {packed.dtype} with scales {scales.dtype}, expected uint8 and float8_e4m3fn"
        )
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    refuse_shape(scales, (rows, columns // nvfp4.BLOCK), ".weight_scale")
    numbers = halves(packed).flatten(1).to(torch.float8_e4m3fn)
    return Centred(numbers, torch.zeros(scales.shape, dtype=torch.int8), scales, 4, whole.float().reshape(()))
