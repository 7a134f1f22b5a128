"""A product of few rows of tokens with a stored matrix, and what is beside it: a norm, a bias, a gate, a residual.

The matrix lies as `[N, K]`, so that a program reads whole rows of it, each once for all tokens.
"""

import torch.nn.functional as F
from torch import Tensor

from . import gate, norm
from .declare import declare

FEW_ROWS = 16  # of tokens; for more of them torch has products
SCHEMA = (
    "(Tensor x, Tensor matrix, Tensor? bias, Tensor? residual, Tensor? scale, float epsilon, float most, "
    "str activation) -> Tensor"
)


def _composition(
    x: Tensor,  # [..., K]
    matrix: Tensor,  # [N, K]; of a gate, its rows and then as many of what it opens
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,  # of a norm of `x`
    epsilon: float,
    most: float,  # a power of two that no number of `scale` exceeds
    activation: str,  # of the gate; "" is none
) -> Tensor:
    if scale is not None:
        x = norm.normed(x, scale, epsilon, matrix.dtype)
    found = F.linear(x, matrix, bias)
    if activation:
        first, second = found.chunk(2, -1)
        found = gate.gated(first, second, activation)
    return found if residual is None else residual + found


def _size(x: Tensor, matrix: Tensor, activation: str) -> tuple[int, ...]:
    return *x.shape[:-1], len(matrix) // 2 if activation else len(matrix)


_product = declare(
    "product",
    SCHEMA,
    lambda x, matrix, *others: x.new_empty(_size(x, matrix, others[-1])),
    _composition,
)


def product(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    *,
    epsilon: float = 0.0,
    most: float = 1.0,
    activation: str = "",
) -> Tensor:
    given = x, matrix, bias, residual, scale, epsilon, most, activation
    few = x.numel() <= FEW_ROWS * x.shape[-1]
    alike = {one.dtype for one in (x, matrix, bias, residual) if one is not None} == {matrix.dtype}
    whole = residual is None or residual.shape == _size(x, matrix, activation)  # else torch repeats one of them
    found: Tensor = (_product if few and alike and whole else _composition)(*given)
    return found
