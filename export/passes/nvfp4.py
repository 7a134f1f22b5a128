"""NVFP4: numbers of four bits (E2M1) whose scales are numbers of eight (E4M3), all times one float."""

import torch
from torch import Tensor

BLOCK = 16  # rows that share a scale, as GPUs read them
TOGETHER = 16  # blocks of each column that are rounded at a time, to take little memory
LARGEST, LARGEST_SCALE = 6, 448
SHARES = (1.0, 0.9, 1.4, 1.5, 1.6)  # of the scale by which the largest number becomes 6; the best by squared error


def to_nvfp4(wide: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Round blocks `[K / 16, 16, N]`; returns the numbers, their scales `[K / 16, N]`, and the float `[]` of those.

    Numbers and scales are `float8_e4m3fn`, which has room for E2M1. The float is rounded as it will be stored, and so
    is its product with a scale.
    """
    lowest, highest = wide.aminmax()
    smallest = torch.finfo(stored).smallest_normal  # not zero, as that of small matrices would be in float16
    whole = torch.maximum(-lowest, highest) / LARGEST / LARGEST_SCALE
    whole = whole.to(stored).float().clamp(min=smallest)
    rounded = [_to_blocks(some, whole, stored) for some in torch.split(wide, TOGETHER)]
    numbers, parts = map(torch.cat, zip(*rounded, strict=True))
    return numbers, parts, whole


def _to_blocks(wide: Tensor, whole: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor]:
    largest = wide.abs().amax(1) / LARGEST
    best, error = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    for share in SHARES:
        parts = _to_e4m3(largest * share / whole)
        scales = widened(parts, whole, stored)
        missed = (_to_e2m1(wide / scales[:, None]) * scales[:, None] - wide).square_().sum(1)
        best, error = torch.where(missed < error, parts, best), torch.minimum(missed, error)
    numbers = _to_e2m1(wide / widened(best, whole, stored)[:, None])
    return numbers.to(torch.float8_e4m3fn), best.to(torch.float8_e4m3fn)


def widened(parts: Tensor, whole: Tensor, stored: torch.dtype) -> Tensor:
    """Return the scales as a graph computes them."""
    return (parts.float() * whole).to(stored).float()


def _to_e4m3(scales: Tensor) -> Tensor:
    """Round to the nearest scale. Zeros, as of pruned blocks, become any other: nothing can be divided by them."""
    rounded = scales.clamp(max=LARGEST_SCALE).to(torch.float8_e4m3fn).float()
    return torch.where(rounded == 0, 1.0, rounded)


def _to_e2m1(wide: Tensor) -> Tensor:
    """Round to the nearest of 0, 0.5, 1, 1.5, 2, 3, 4 and 6 and their negatives."""
    size = wide.abs()
    steps = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (wide / steps).round_().mul_(steps).clamp_(-LARGEST, LARGEST)
