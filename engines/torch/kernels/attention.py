"""Attention of few queries over the live entries of a cache, whose mask no memory holds."""

from typing import Any

import torch
from torch import Tensor

from ...contract import WIDEST_STEP
from ..attending import attention as attend
from ..attending import left_by_sinks, seen_entries
from .declare import declare

MOST_TOKENS = WIDEST_STEP  # of a call; more are a prompt's, for which torch has kernels
MOST_NUMBERS = 256  # of a head
LEAST_PART, MOST_PARTS = 256, 64  # of a cache: entries that a program reads, and how often it is divided
MOST_BYTES = 128 << 20  # of what is attended to in each part; more rows than that attend one after the other
SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor start, Tensor depths, Tensor ancestors, Tensor? sinks, "
    "float scale, float softcap, int window) -> Tensor"
)


def _composition(
    query: Tensor,  # [B, heads, S, D]
    key: Tensor,  # [B, kv_heads, T, D]
    value: Tensor,  # [B, kv_heads, T, D]
    start: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    sinks: Tensor | None,  # one for each head
    scale: float,
    softcap: float,
    window: int,
) -> Tensor:
    mask = seen_entries(start, depths, ancestors, key.shape[2], window)
    found = attend(query, key, value, mask, scale, softcap)
    return found if sinks is None else found * left_by_sinks(query, key, mask, scale, sinks)


def _shape(query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
    """Lay heads beside one another [B, S, heads, D], so that the next product reads them without a copy."""
    batch, heads, width = query.shape[:3]
    return query.new_empty(batch, width, heads, value.shape[3]).transpose(1, 2)


def _on_cpu(query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
    return _shape(query, key, value).copy_(_composition(query, key, value, *others))


_attention = declare("attention", SCHEMA, _shape, _on_cpu)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float | None = None,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:
    scale = query.shape[3] ** -0.5 if scale is None else scale
    few = query.shape[2] <= MOST_TOKENS and max(query.shape[3], value.shape[3]) <= MOST_NUMBERS
    how: Any = _attention if few and query.dtype == key.dtype == value.dtype else _composition
    together = rows_together(query, value) if how is _attention else len(query)
    of_rows, others = (query, key, value, start, depths, ancestors), (sinks, scale, softcap, window)
    if together >= len(query):
        whole: Tensor = how(*of_rows, *others)
        return whole
    parts = [
        how(*(one[first : first + together] for one in of_rows), *others).transpose(1, 2)
        for first in range(0, len(query), together)
    ]
    return torch.cat(parts).transpose(1, 2)


def rows_together(query: Tensor, value: Tensor) -> int:
    """Return how many rows attend at once: the parts of the others need no memory meanwhile."""
    (_, heads, width, _), (_, _, capacity, size) = query.shape, value.shape
    return max(1, MOST_BYTES // _bytes_of_a_row(heads, width, capacity, size))


def most_bytes(rows: int, heads: int, capacity: int, size: int) -> int:
    """Return what the parts of so many rows take at most, whose values have this size."""
    if size > MOST_NUMBERS:  # torch's own operations attend
        return 0
    each = [_bytes_of_a_row(heads, width, capacity, size) for width in range(1, MOST_TOKENS + 1)]
    return max(min(rows, max(1, MOST_BYTES // one)) * one for one in each)


def _bytes_of_a_row(heads: int, width: int, capacity: int, size: int) -> int:
    """Return what the parts of a row's tokens take: weighted values, a highest score and a sum of weights each."""
    return 4 * heads * width * min(MOST_PARTS, -(-capacity // LEAST_PART)) * (size + 2)
