"""MXFP4: numbers of four bits (E2M1), two a byte, and an exponent for each 32; gpt-oss stores its experts so."""

import torch
from torch import Tensor

from .method import Method, Parts, Settings, powers_of_two, refuse_shape

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def matrix(parts: Parts, settings: Settings) -> Tensor:
    blocks, exponents = parts["_blocks"], parts["_scales"]  # [E, N, K / 32, 16] and [E, N, K / 32], both bytes
    refuse_shape(exponents, tuple(blocks.shape[:-1]), "_scales")
    numbers = VALUES[torch.stack((blocks & 15, blocks >> 4), -1).int()]  # [E, N, K / 32, 16, 2]: the low half is first
    numbers *= powers_of_two(exponents)[..., None, None]
    return numbers.flatten(2).mT.contiguous()  # [E, K, N]: these experts multiply from the left


def words(settings: Settings) -> str:
    return "4 bits (E2M1), groups of 32"


MXFP4 = Method(needs=(frozenset({"_blocks", "_scales"}),), may_have=frozenset(), matrix=matrix, words=words, whole="")
