"""MXFP4: numbers of four bits (E2M1), two a byte, and an exponent for each 32; gpt-oss stores its experts so."""

import torch
from torch import Tensor

from .method import Method, Parts, Settings, powers_of_two, refuse_shape

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def halves(packed: Tensor) -> Tensor:
    """Read bytes `[…]` as two numbers each `[…, 2]`, the low half first."""
    return VALUES[torch.stack((packed & 15, packed >> 4), -1).int()]


def matrix(parts: Parts, settings: Settings) -> Tensor:
    blocks, exponents = parts["_blocks"], parts["_scales"]  # [E, N, K / 32, 16] and [E, N, K / 32], both bytes
    refuse_shape(exponents, tuple(blocks.shape[:-1]), "_scales")
    numbers = halves(blocks) * powers_of_two(exponents)[..., None, None]  # [E, N, K / 32, 16, 2]
    return numbers.flatten(2).mT.contiguous()  # [E, K, N]: these experts multiply from the left


def words(settings: Settings) -> str:
    return "4 bits (E2M1), groups of 32"


MXFP4 = Method(needs=(frozenset({"_blocks", "_scales"}),), may_have=frozenset(), matrix=matrix, words=words, whole="")
