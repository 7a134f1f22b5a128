"""Writes a call's keys and values into the cache, and rotates keys and queries by the angles of their positions."""

import torch
from torch import Tensor

from ..attending import first_numbers
from .declare import declare
from .norm import normed


def put(past: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    """Write in place; the output is the memory of `past` [B, heads, T, D]."""
    batch, heads, width, _ = rows.shape
    row, head = first_numbers(batch, -1, 1, 1), first_numbers(heads, -1, 1)
    position = start.view(-1, 1, 1) + first_numbers(width, -1)  # [B, 1, S]
    return past.index_put_((row, head, position), rows)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [B, heads, S, D], or the first numbers of each head, by angles [B, S, D / 2] or fewer."""
    both = torch.cat((cos, cos), -1).unsqueeze(1)
    signed = torch.cat((-sin, sin), -1).unsqueeze(1)
    rotated, rest = x[..., : both.shape[-1]], x[..., both.shape[-1] :]
    rotated = torch.addcmul(rotated * both, rotated.roll(cos.shape[-1], -1), signed)
    return torch.cat((rotated, rest), -1) if rest.shape[-1] else rotated


def _normed(x: Tensor, scale: Tensor | None, epsilon: float, dtype: torch.dtype | None) -> Tensor:
    return x if scale is None else normed(x, scale, epsilon, dtype or x.dtype)


def _rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor | None = None,
    epsilon: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return turned(_normed(x, scale, epsilon, dtype), cos, sin)


def _write(keys: Tensor, values: Tensor, start: Tensor, past_keys: Tensor, past_values: Tensor) -> None:
    put(past_keys, keys, start)
    put(past_values, values, start)


def _rotate_write(
    queries: Tensor,  # [B, heads, S, D]
    keys: Tensor,  # [B, kv_heads, S, D]
    values: Tensor,
    cos: Tensor,  # [B, S, D / 2], or fewer than that
    sin: Tensor,
    start: Tensor,  # [B]
    past_keys: Tensor,  # [B, kv_heads, T, D]
    past_values: Tensor,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    query_epsilon: float = 0.0,
    key_epsilon: float = 0.0,
    query_dtype: torch.dtype | None = None,  # of what its norm gives
    key_dtype: torch.dtype | None = None,
) -> Tensor:
    """Norm the heads of queries and keys if there are scales, rotate both, write, and give the queries."""
    put(past_keys, turned(_normed(keys, key_scale, key_epsilon, key_dtype), cos, sin), start)
    put(past_values, values, start)
    return _rotate(queries, cos, sin, query_scale, query_epsilon, query_dtype)


def _new(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)


_rotated = declare(
    "rotate",
    "(Tensor x, Tensor cos, Tensor sin, Tensor? scale=None, float epsilon=0.0, ScalarType? dtype=None) -> Tensor",
    lambda x, cos, sin, scale=None, epsilon=0.0, dtype=None: _new(x, dtype),
    _rotate,
)
_written = declare(
    "write",
    "(Tensor keys, Tensor values, Tensor start, Tensor(a!) past_keys, Tensor(b!) past_values) -> ()",
    lambda *_, **__: None,
    _write,
)
_rotated_and_written = declare(
    "rotate_write",
    "(Tensor queries, Tensor keys, Tensor values, Tensor cos, Tensor sin, Tensor start, Tensor(a!) past_keys,"
    " Tensor(b!) past_values, Tensor? query_scale=None, Tensor? key_scale=None, float query_epsilon=0.0,"
    " float key_epsilon=0.0, *, ScalarType? query_dtype=None, ScalarType? key_dtype=None) -> Tensor",
    lambda queries, *_, query_dtype=None, **__: _new(queries, query_dtype),
    _rotate_write,
)


def _expect_angles(x: Tensor, cos: Tensor, numbers: int) -> None:
    numbers = numbers or x.shape[-1]
    if (x.dim(), cos.dim(), 2 * cos.shape[-1]) != (4, 3, numbers):
        raise ValueError(
            f"{numbers} numbers of {list(x.shape)} are rotated by angles {list(cos.shape)}, expected "
            f"[B, heads, S, D] by [B, S, {numbers} / 2]"
        )


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor | None,
    epsilon: float,
    numbers: int,
    dtype: torch.dtype | None,
) -> Tensor:
    """Rotate the first `numbers` of each head, or all if that is 0."""
    _expect_angles(x, cos, numbers)
    found: Tensor = _rotated(x, cos, sin, scale, epsilon, dtype)
    return found


def write(keys: Tensor, values: Tensor, start: Tensor, past_keys: Tensor, past_values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the caches, which are the same memory as before."""
    _written(keys, values, start, past_keys, past_values)
    return past_keys, past_values


def rotate_write(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    start: Tensor,
    past_keys: Tensor,
    past_values: Tensor,
    query_scale: Tensor | None,
    key_scale: Tensor | None,
    query_epsilon: float,
    key_epsilon: float,
    numbers: int,
    query_dtype: torch.dtype | None,
    key_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rotated queries, and the caches, which are the same memory as before."""
    _expect_angles(queries, cos, numbers)
    _expect_angles(keys, cos, numbers)
    tensors = queries, keys, values, cos, sin, start, past_keys, past_values, query_scale, key_scale
    dtypes = {"query_dtype": query_dtype, "key_dtype": key_dtype}
    return _rotated_and_written(*tensors, query_epsilon, key_epsilon, **dtypes), past_keys, past_values
