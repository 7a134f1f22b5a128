"""A product of few rows with a matrix of small numbers, which become in registers what they would be in memory."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..narrow_product import MOST_ROWS
from .layout import by_number

COLUMNS = 16  # of the product, a program
NUMBERS = 128  # of each column at a time
FEW_ROWS, ROWS = 16, 32  # of tokens, a program: the least of a product in hardware, or of more the matrix is read again


@triton.jit
def _widened(
    numbers,
    scales,
    zeros,
    column,
    place,
    live,
    size,
    block,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Load numbers of some columns, and round them with their scales as a matrix in memory is rounded."""
    columns, places = column[:, None], place[None, :]
    of_block = columns * (size // block) + places // block
    if KIND == "int4":
        byte = tl.load(numbers + columns * (size // 2) + places // 2, mask=live, other=0).to(tl.int32)
        number = ((byte >> (places % 2 * 4) & 15) ^ 8) - 8
    else:
        number = tl.load(numbers + columns * size + places, mask=live, other=0).to(tl.int32)
    if ZEROS:
        number -= tl.load(zeros + of_block, mask=live, other=0).to(tl.int32)
    if KIND == "e4m3":  # by its bits, since not every GPU has the type
        fraction, power = number & 7, number >> 3 & 15
        normal = ((power + 120 << 23) | (fraction << 20)).to(tl.float32, bitcast=True)
        wide = tl.where(power == 0, fraction.to(tl.float32) * 0.001953125, normal)
        wide = tl.where(number & 128 != 0, -wide, wide)
    else:
        wide = number.to(tl.float32)
    return (wide * tl.load(scales + of_block, mask=live, other=0.0).to(tl.float32)).to(DTYPE)


@triton.jit
def _product(
    x,
    numbers,
    scales,
    zeros,
    found,
    rows,
    columns,
    size,
    block,
    x_row,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NUMBERS: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
    WIDE: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, size, NUMBERS):
        place = begin + tl.arange(0, NUMBERS)
        live = (column[:, None] < columns) & (place[None, :] < size)
        dtype = x.dtype.element_ty
        matrix = _widened(numbers, scales, zeros, column.to(tl.int64), place, live, size, block, KIND, ZEROS, dtype)
        inside = (row[:, None] < rows) & (place[None, :] < size)
        tokens = tl.load(x + row[:, None] * x_row + place[None, :], mask=inside, other=0.0)
        if WIDE:
            tokens, matrix = tokens.to(tl.float32), matrix.to(tl.float32)
        total = tl.dot(tokens, tl.trans(matrix), total, input_precision="ieee")
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(found + row[:, None] * columns + column[None, :], total.to(found.dtype.element_ty), mask=inside)


@triton.jit
def _matrix(
    numbers,
    scales,
    zeros,
    found,
    size,
    block,
    NUMBERS: tl.constexpr,
    KIND: tl.constexpr,
    ZEROS: tl.constexpr,
):
    column = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    place = tl.program_id(1) * NUMBERS + tl.arange(0, NUMBERS)
    live = place[None, :] < size
    dtype = found.dtype.element_ty
    matrix = _widened(numbers, scales, zeros, column, place, live, size, block, KIND, ZEROS, dtype)
    tl.store(found + column[:, None] * size + place[None, :], matrix, mask=live)


def _kind(numbers: Tensor) -> tuple[str, Tensor]:
    """Name how numbers are stored, and return them as integers."""
    if numbers.dtype == torch.float8_e4m3fn:
        return "e4m3", numbers.view(torch.uint8)
    return ("int4" if numbers.dtype == torch.uint8 else "int8"), numbers


def narrow_product(x: Tensor, numbers: Tensor, scales: Tensor, zeros: Tensor | None = None) -> Tensor:
    size, columns = x.shape[-1], numbers.shape[0]
    tokens = by_number(x).reshape(-1, size)
    kind, stored = _kind(numbers)
    given = stored, scales, zeros
    options = {"size": size, "block": size // scales.shape[1], "KIND": kind, "ZEROS": zeros is not None}
    if len(tokens) > MOST_ROWS:
        matrix = torch.empty(columns, size, dtype=scales.dtype, device=x.device)
        _matrix[(columns, triton.cdiv(size, 1024))](*given, matrix, NUMBERS=1024, **options)
        return torch.matmul(x, matrix.t())
    found = torch.empty((*x.shape[:-1], columns), dtype=x.dtype, device=x.device)
    wide = x.dtype == torch.float32  # whose sums fill the registers
    rows = FEW_ROWS if len(tokens) <= FEW_ROWS or wide else ROWS
    _product[(triton.cdiv(columns, COLUMNS), triton.cdiv(len(tokens), rows))](
        tokens,
        *given,
        found,
        rows=len(tokens),
        columns=columns,
        x_row=tokens.stride(0),
        ROWS=rows,
        COLUMNS=COLUMNS,
        NUMBERS=NUMBERS // 2 if wide else NUMBERS,
        WIDE=not isinstance(_product, triton.JITFunction),  # Triton's interpreter would multiply bits of bfloat16
        **options,
    )
    return found
