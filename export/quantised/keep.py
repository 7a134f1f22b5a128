"""Keep the small numbers of a quantised checkpoint where a graph can hold them, bit for bit."""

import torch
from torch import Tensor

from ..passes import nvfp4
from ..passes.blocks import Blocks
from ..passes.quantise import BLOCK, FLOATS, SMALLEST_BLOCK
from .dequantise import Dequantised
from .method import Centred

BITS = {"int8": 8, "int4": 4, "fp8": 8, "nvfp4": 4}


class Kept:
    """The matrices of one checkpoint that a graph takes as they are stored; it counts them."""

    def __init__(self, stored: Dequantised) -> None:
        self._stored = stored
        self.count, self.rounded = 0, 0  # matrices, and those of them whose scales are rounded

    def __str__(self) -> str:
        if self.count == 0:
            return "dequantised and stored anew"
        kept = "kept, their scales rounded" if self.rounded else "kept bit for bit"
        return f"{self.count} of {self._stored.matrices} matrices {kept}, the others stored anew"

    def __call__(self, name: str, kind: str, dtype: torch.dtype) -> Blocks | None:
        """Return a matrix `[K, N]` in blocks; None where rounding anew is what a graph needs."""
        found = self._stored.centred(name) if kind in BITS else None
        if found is None or found.bits > BITS[kind] or found.numbers.is_floating_point() != (kind in FLOATS):
            return None
        if (found.whole is None) == (kind == "nvfp4"):
            return None
        if found.whole is not None:
            return self._nvfp4(found, dtype)
        if not torch.equal(found.scales.to(dtype).float(), found.scales):
            return None
        if not bool(found.scales.all()):  # TensorRT refuses scales of zero
            return None
        group = found.numbers.shape[1] // found.scales.shape[1]
        block = group if kind == "fp8" else next((size for size in _sizes() if group % size == 0), None)
        if block is None:
            return None
        numbers, zeros = found.numbers, found.zeros if bool(found.zeros.any()) else None
        if zeros is not None and kind == "int8":  # engines have no zero points for these, but room for the differences
            apart = numbers.to(torch.int16) - zeros.repeat_interleave(group, 1)
            numbers, zeros = apart.to(torch.int8), None
            if not torch.equal(numbers, apart):
                return None
        self.count += 1

        def of_blocks(one: Tensor) -> Tensor:  # what holds for many rows holds for fewer as well
            return one.repeat_interleave(group // block, 1).T.contiguous()

        return Blocks(
            numbers.T.contiguous(), of_blocks(found.scales), block, None if zeros is None else of_blocks(zeros)
        )

    def _nvfp4(self, found: Centred, dtype: torch.dtype) -> Blocks | None:
        """Keep the numbers; their scales are rounded as a graph computes them in half precision."""
        assert found.whole is not None
        whole = found.whole.to(dtype).float()
        parts = found.scales.T.contiguous()
        if whole < torch.finfo(dtype).smallest_normal or not bool((parts.float() > 0).all()):
            return None
        self.count += 1
        scales = nvfp4.widened(parts, whole, dtype)
        self.rounded += not torch.equal(scales, parts.float() * found.whole)
        return Blocks(found.numbers.T.contiguous(), scales, nvfp4.BLOCK, made_of=(parts, whole))


def _sizes() -> list[int]:
    """Return the sizes of blocks that engines have kernels for, the largest first."""
    size, sizes = max(BLOCK.values()), []
    while size >= SMALLEST_BLOCK:
        sizes.append(size)
        size //= 2
    return sizes
