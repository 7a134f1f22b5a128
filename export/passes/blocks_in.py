"""Find the blocks of small numbers that a dequantised matrix was made of, as GGUF files hold them.

A matrix of Q4_0, Q8_0, Q6_K and their like is scale × whole number, one of Q4_1 or Q4_K that and a shift. Both are
found from the matrix itself, whatever a family has done to the order of its rows, and are taken only if they make the
very same bits.
"""

import torch
from torch import Tensor

from .blocks import Blocks

SIZES = (32, 16)  # of blocks
LARGEST = {"int4": 8, "int8": 127}  # of whole numbers, by their type
LEVELS = 15  # steps between the smallest and the largest number of a block with a shift
BITS = 17  # of a scale or a shift: Q4_1 has halves, of 11 bits, and Q4_K has them times a number of 6 bits
TRIES = [(steps, first) for steps in range(LEVELS, 0, -1) for first in range(LEVELS - steps + 1)]
NOISE = 2**-20  # of the spread of a block: less of a shift is none
TRIED = 64  # blocks of a matrix that are looked at first


def blocks_in(matrix: Tensor) -> Blocks | None:
    """Return a matrix `[K, N]` in blocks that make its very bits; None if it is not made of such."""
    if matrix.dtype != torch.float32:
        return None
    for size in SIZES:
        if matrix.shape[0] % size == 0:
            blocks = matrix.detach().T.reshape(-1, size)  # [N × K / size, size]
            spread = blocks[:: max(1, len(blocks) // TRIED)]
            for find in (_scaled, _shifted):
                if find(spread) is not None and (found := find(blocks)) is not None:
                    return _laid_out(*found, matrix.shape, size)
    return None


Found = tuple[Tensor, Tensor, Tensor | None]  # numbers [M, size], scales [M], shifts [M]


def _scaled(blocks: Tensor) -> Found | None:
    """Find whole numbers and one scale for each block: some number is the largest, so that it tells the scale."""
    largest = blocks.abs().amax(1)
    scales, left = torch.ones_like(largest), largest > 0
    four, eight = range(LARGEST["int4"], 0, -1), range(LARGEST["int8"], LARGEST["int4"], -1)
    mostly_four = bool(
        (_round(blocks, largest / four[0]) * (largest / four[0])[:, None] == blocks).all(1).float().mean() > 0.5
    )
    for most in (*four, *eight) if mostly_four else (*four[:1], *eight, *four[1:]):
        if not bool(left.any()):
            break
        places = left.nonzero()[:, 0]
        tried, scale = blocks[places], largest[places] / most
        same = (_round(tried, scale) * scale[:, None] == tried).all(1)
        scales[places[same]], left[places[same]] = scale[same], False
    if bool(left.any()):
        return None
    numbers = _round(blocks, scales)
    turned = (numbers.amax(1) == LARGEST["int4"]) & (numbers.amin(1) > -LARGEST["int4"])  # four bits hold -8, not 8
    sign = torch.where(turned, -1.0, 1.0)
    return numbers * sign[:, None], scales * sign, None


def _shifted(blocks: Tensor) -> Found | None:
    """Find whole numbers from 0 to 15, a scale and a shift for each block, the last two of few bits.

    Most blocks hold 0 and 15; others are tried with each least and each largest number.
    """
    lowest = blocks.amin(1).double()
    spread = blocks.amax(1).double() - lowest
    numbers = torch.zeros_like(blocks)
    scales, shifts, left = torch.ones_like(lowest), lowest.clone(), spread > 0
    for steps, first in TRIES:
        if not bool(left.any()):
            break
        places = left.nonzero()[:, 0]
        tried, scale = blocks[places], _of_few_bits(spread[places] / steps)
        shift = lowest[places] - first * scale
        shift = _of_few_bits(torch.where(shift.abs() < NOISE * spread[places], 0.0, shift))
        wide, off = scale.float()[:, None], shift.float()[:, None]
        found = ((tried - off) / wide).round_()
        same = ((found * wide + off == tried) & (found >= 0) & (found <= LEVELS)).all(1)
        matched = places[same]
        numbers[matched], scales[matched], shifts[matched] = found[same], scale[same], shift[same]
        left[matched] = False
    return None if bool(left.any()) else (numbers, scales.float(), shifts.float())


def _of_few_bits(values: Tensor) -> Tensor:
    """Take away what rounding has added to products of a half and a number of six bits."""
    fraction, exponent = torch.frexp(values)
    return torch.ldexp((fraction * 2**BITS).round_() / 2**BITS, exponent)


def _round(blocks: Tensor, scales: Tensor) -> Tensor:
    return (blocks / scales[:, None]).round_()


def _laid_out(numbers: Tensor, scales: Tensor, shifts: Tensor | None, shape: torch.Size, size: int) -> Blocks:
    """Turn what was found of each column's blocks into a matrix of blocks; numbers above 7 get a zero point."""
    rows, columns = shape

    def of_blocks(one: Tensor) -> Tensor:
        return one.view(columns, rows // size).T.contiguous()

    zeros = None
    if shifts is not None:
        numbers = numbers - LARGEST["int4"]
        zeros = of_blocks(torch.full_like(scales, -LARGEST["int4"])).to(torch.int8)
    return Blocks(
        numbers.to(torch.int8).view(columns, rows).T.contiguous(),
        of_blocks(scales),
        size,
        zeros,
        shifts=None if shifts is None else of_blocks(shifts),
    )
