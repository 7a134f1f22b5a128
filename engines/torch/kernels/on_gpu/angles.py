"""Cosines and sines of the positions of a call's tokens, each read from a table by one program."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _angles(
    start,
    depths,
    cosines,
    sines,
    cos,
    sin,
    width,
    last,
    size,
    depth_row,
    depth_place,
    SIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row, place = token // width, token % width
    position = tl.load(start + row) + tl.load(depths + row * depth_row + place * depth_place)
    position = tl.minimum(tl.maximum(position, 0), last)  # of what nobody reads any
    number = tl.arange(0, SIZE)
    live = number < size
    tl.store(cos + token * size + number, tl.load(cosines + position * size + number, mask=live), mask=live)
    tl.store(sin + token * size + number, tl.load(sines + position * size + number, mask=live), mask=live)


def angles(start: Tensor, depths: Tensor, cosines: Tensor, sines: Tensor, width: int) -> tuple[Tensor, Tensor]:
    positions, size = cosines.shape
    cos, sin = (
        torch.empty((len(start), width, size), dtype=each.dtype, device=each.device) for each in (cosines, sines)
    )
    own = depths[:, -width:]
    _angles[(len(start) * width,)](
        start,
        own,
        cosines,
        sines,
        cos,
        sin,
        width,
        positions - 1,
        size,
        own.stride(0),
        own.stride(1),
        triton.next_power_of_2(size),
    )
    return cos, sin
