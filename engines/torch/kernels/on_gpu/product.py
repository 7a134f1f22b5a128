"""A product of few rows of tokens with a matrix whose rows are read once, and the operations beside it, as one kernel.

A token's sums are made in an order that the matrix alone decides: it has the same bits beside any others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..product import FEW_ROWS
from .attention import INTERPRETED
from .attention import product as multiplied
from .gate import activated
from .layout import by_number

LEAST_COLUMNS, MOST_COLUMNS = 16, 64  # of the product, a program
PROGRAMS = 256  # that a matrix is divided among, if it has the columns: two for each part of a large GPU
TILE_BYTES, LEAST_NUMBERS = 8192, 32  # of the matrix at a time, of which four are on their way
STAGES = 4


@triton.jit
def _products(
    x,
    matrix,
    bias,
    residual,
    scale,
    found,
    rows,
    columns,
    size,
    x_row,
    residual_row,
    epsilon,
    most,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ADD: tl.constexpr,
    WIDEN: tl.constexpr,
):
    row, column = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    asked, there = (row < rows)[:, None], (column < columns)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    opened = tl.zeros((ROWS, COLUMNS), tl.float32)
    squares = tl.zeros((ROWS, NUMBERS), tl.float32)
    numbers_at = matrix + column.to(tl.int64)[None, :] * size
    opens_at = matrix + (columns + column).to(tl.int64)[None, :] * size
    for begin in range(0, size, NUMBERS):
        place = begin + tl.arange(0, NUMBERS)
        inside = place < size
        tokens = tl.load(x + row[:, None] * x_row + place[None, :], mask=asked & inside[None, :], other=0.0)
        if NORM:  # by the root of all numbers, which is known after the last one
            wide = tokens.to(tl.float32)
            squares += wide * wide
            factor = tl.load(scale + place, mask=inside, other=0.0).to(tl.float32) / most  # so that no token overflows
            tokens = (wide * factor[None, :]).to(tokens.dtype)
        live = inside[:, None] & there
        numbers = tl.load(numbers_at + place[:, None], mask=live, other=0.0, eviction_policy="evict_first")
        total += multiplied(tokens, numbers, WIDEN)
        if ACTIVATION != "":
            numbers = tl.load(opens_at + place[:, None], mask=live, other=0.0, eviction_policy="evict_first")
            opened += multiplied(tokens, numbers, WIDEN)
    if NORM:
        root = (most * tl.rsqrt(tl.sum(squares, 1) / size + epsilon))[:, None]
        total *= root
        opened *= root
    if BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION != "":
        if BIAS:
            opened += tl.load(bias + columns + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
        total = activated(total, ACTIVATION) * opened
    if ADD:
        at = residual + row[:, None] * residual_row + column[None, :]
        total += tl.load(at, mask=asked & there, other=0.0).to(tl.float32)
    at = found + row[:, None] * columns + column[None, :]
    tl.store(at, total.to(found.dtype.element_ty), mask=asked & there)


def _columns(columns: int) -> int:
    """Return how many columns a program has."""
    share: int = triton.next_power_of_2(columns // PROGRAMS + 1) // 2
    return max(LEAST_COLUMNS, min(MOST_COLUMNS, share))


def product(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    scale: Tensor | None,
    epsilon: float,
    most: float,
    activation: str,
) -> Tensor:
    parts, size = 2 if activation else 1, x.shape[-1]
    columns = len(matrix) // parts
    tokens = by_number(x).reshape(-1, size)
    residuals = None if residual is None else by_number(residual).reshape(-1, columns)
    found = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
    own = _columns(columns)
    _products[(triton.cdiv(columns, own),)](
        tokens,
        matrix,
        *(matrix if one is None else one for one in (bias, residuals, scale)),  # what is not there is not read
        found,
        rows=len(tokens),
        columns=columns,
        size=size,
        x_row=tokens.stride(0),
        residual_row=0 if residuals is None else residuals.stride(0),
        epsilon=epsilon,
        most=most,
        ROWS=FEW_ROWS,
        COLUMNS=own,
        NUMBERS=max(LEAST_NUMBERS, TILE_BYTES // (parts * own * x.element_size())),
        NORM=scale is not None,
        BIAS=bias is not None,
        ACTIVATION=activation,
        ADD=residual is not None,
        WIDEN=INTERPRETED,
        num_stages=STAGES,
    )
    return found
