"""A product with a matrix of small numbers: int8, int4 or E4M3, with a scale for each block of rows and column.

The matrix lies as `[N, K]`, two numbers of int4 in a byte, and is widened in registers for up to `MOST_ROWS` rows of
tokens.
"""

import torch
from torch import Tensor

from .declare import declare

MOST_ROWS = 128  # for more of them, as a prompt has or a very wide batch, the matrix is widened first


def packed(numbers: Tensor) -> Tensor:
    """Put two numbers from -8 to 7 into each byte, the first one in its lower half."""
    return ((numbers[:, ::2] & 15) | (numbers[:, 1::2] << 4)).view(torch.uint8)


def widened(numbers: Tensor, scales: Tensor, zeros: Tensor | None) -> Tensor:
    """Return the numbers that a matrix stands for, `[N, K]`."""
    if numbers.dtype == torch.uint8:
        signed = numbers.view(torch.int8)
        numbers = torch.stack((signed << 4 >> 4, signed >> 4), -1).flatten(1)
    blocks = numbers.view(*scales.shape, -1)
    blocks = blocks if zeros is None else blocks - zeros.unsqueeze(-1)
    return (blocks.to(scales.dtype) * scales.unsqueeze(-1)).flatten(1)


def _product(x: Tensor, numbers: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    return torch.matmul(x, widened(numbers, scales, zeros).t())


narrow_product = declare(
    "narrow_product",
    "(Tensor x, Tensor numbers, Tensor scales, Tensor? zeros=None) -> Tensor",
    lambda x, numbers, scales, zeros=None: x.new_empty((*x.shape[:-1], numbers.shape[0])),
    _product,
)


def launches(x: Tensor, *others: object) -> int:
    """Return how many kernels it has on CUDA."""
    return 1 if x.numel() <= MOST_ROWS * x.shape[-1] else 2
