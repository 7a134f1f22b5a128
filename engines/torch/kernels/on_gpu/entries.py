"""Rotates queries and keys and writes keys and values into the cache; a program has one head of one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import by_number


@triton.jit
def _put(
    x,
    into,
    inside,
    cos,
    sin,
    angles,
    scale,
    epsilon,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM: tl.constexpr,
):
    """Norm one head, rotate its first numbers, each with its partner in the other half of them, and store it."""
    place = tl.arange(0, BLOCK)
    live = place < SIZE
    value = tl.load(x + place, mask=live, other=0.0).to(tl.float32)
    if NORM:
        root = tl.rsqrt(tl.sum(value * value) / SIZE + epsilon)
        value *= root * tl.load(scale + place, mask=live, other=0.0).to(tl.float32)
    if ROTATE:
        turns = place < 2 * angles
        first = place < angles
        partner = tl.where(first, place + angles, place - angles)
        other = tl.load(x + partner, mask=turns, other=0.0).to(tl.float32)
        if NORM:
            other *= root * tl.load(scale + partner, mask=turns, other=0.0).to(tl.float32)
        angle = tl.where(first, place, place - angles)
        across = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
        along = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
        value = value * across + tl.where(first, -other, other) * along
    tl.store(into + place, value.to(into.dtype.element_ty), mask=live & inside)


@triton.jit
def _entries(
    queries,
    keys,
    values,
    cos,
    sin,
    start,
    past_keys,
    past_values,
    query_scale,
    key_scale,
    found,
    query_epsilon,
    key_epsilon,
    width,
    capacity,
    angles,  # half of the numbers that are rotated
    queries_row,
    queries_head,
    queries_token,
    keys_row,
    keys_head,
    keys_token,
    values_row,
    values_head,
    values_token,
    cos_row,
    cos_token,
    sin_row,
    sin_token,
    past_keys_row,
    past_keys_head,
    past_keys_entry,
    past_values_row,
    past_values_head,
    past_values_entry,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATE: tl.constexpr,
    NORM_QUERIES: tl.constexpr,
    NORM_KEYS: tl.constexpr,
):
    row = (tl.program_id(0) // width).to(tl.int64)
    token = tl.program_id(0) % width
    head = tl.program_id(1)
    cos += row * cos_row + token * cos_token
    sin += row * sin_row + token * sin_token
    if head < HEADS:
        queries += row * queries_row + head * queries_head + token * queries_token
        found += ((row * HEADS + head) * width + token) * SIZE
        _put(queries, found, True, cos, sin, angles, query_scale, query_epsilon, SIZE, BLOCK, ROTATE, NORM_QUERIES)
    elif KV_HEADS > 0:  # else there is no cache
        entry = tl.load(start + row) + token
        inside = (entry >= 0) & (entry < capacity)  # never beside the cache
        own = head - HEADS
        if own < KV_HEADS:
            keys += row * keys_row + own * keys_head + token * keys_token
            past_keys += row * past_keys_row + own * past_keys_head + entry * past_keys_entry
            _put(keys, past_keys, inside, cos, sin, angles, key_scale, key_epsilon, SIZE, BLOCK, ROTATE, NORM_KEYS)
        else:
            own -= KV_HEADS
            values += row * values_row + own * values_head + token * values_token
            past_values += row * past_values_row + own * past_values_head + entry * past_values_entry
            _put(values, past_values, inside, cos, sin, angles, values, 0.0, VALUE_SIZE, BLOCK, False, False)


def _strides(name: str, x: Tensor | None, axes: tuple[str, ...]) -> dict[str, int]:
    return {f"{name}_{axis}": 0 if x is None else x.stride(place) for place, axis in enumerate(axes)}


def _launch(
    queries: Tensor | None,
    keys: Tensor | None,
    values: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    start: Tensor | None,
    past_keys: Tensor | None,
    past_values: Tensor | None,
    query_scale: Tensor | None,
    key_scale: Tensor | None,
    found: Tensor | None,
    query_epsilon: float,
    key_epsilon: float,
) -> None:
    some = keys if queries is None else queries
    assert some is not None
    (batch, _, width, size), value_size = some.shape, 1 if values is None else values.shape[3]
    heads, kv_heads = (0 if x is None else x.shape[1] for x in (queries, keys))
    per_head, entries = ("row", "head", "token"), ("row", "head", "entry")
    pointers = {
        "queries": queries,
        "keys": keys,
        "values": values,
        "cos": cos,
        "sin": sin,
        "start": start,
        "past_keys": past_keys,
        "past_values": past_values,
        "query_scale": query_scale,
        "key_scale": key_scale,
        "found": found,
    }
    _entries[(batch * width, heads + 2 * kv_heads)](
        **{name: some if x is None else x for name, x in pointers.items()},  # what is not there is not read
        query_epsilon=query_epsilon,
        key_epsilon=key_epsilon,
        width=width,
        capacity=0 if past_keys is None else past_keys.shape[2],
        angles=0 if cos is None else cos.shape[2],
        **_strides("queries", queries, per_head),
        **_strides("keys", keys, per_head),
        **_strides("values", values, per_head),
        **_strides("cos", cos, ("row", "token")),
        **_strides("sin", sin, ("row", "token")),
        **_strides("past_keys", past_keys, entries),
        **_strides("past_values", past_values, entries),
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=size,
        VALUE_SIZE=value_size,
        BLOCK=triton.next_power_of_2(max(size, value_size)),
        ROTATE=cos is not None,
        NORM_QUERIES=query_scale is not None,
        NORM_KEYS=key_scale is not None,
        num_warps=1,
    )


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    scale: Tensor | None = None,
    epsilon: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    found = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    cos, sin = (by_number(each.expand(len(x), -1, -1)) for each in (cos, sin))
    _launch(by_number(x), None, None, cos, sin, None, None, None, scale, None, found, epsilon, 0.0)
    return found


def write(keys: Tensor, values: Tensor, start: Tensor, past_keys: Tensor, past_values: Tensor) -> None:
    keys, values = by_number(keys), by_number(values)
    _launch(None, keys, values, None, None, start, past_keys, past_values, None, None, None, 0.0, 0.0)


def rotate_write(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    cos: Tensor,
    sin: Tensor,
    start: Tensor,
    past_keys: Tensor,
    past_values: Tensor,
    query_scale: Tensor | None = None,
    key_scale: Tensor | None = None,
    query_epsilon: float = 0.0,
    key_epsilon: float = 0.0,
    query_dtype: torch.dtype | None = None,
    key_dtype: torch.dtype | None = None,  # what is written has the type of the cache
) -> Tensor:
    found = torch.empty(queries.shape, dtype=query_dtype or queries.dtype, device=queries.device)
    queries, keys, values = map(by_number, (queries, keys, values))
    cos, sin = (by_number(each.expand(len(queries), -1, -1)) for each in (cos, sin))
    scales = query_scale, key_scale
    _launch(queries, keys, values, cos, sin, start, past_keys, past_values, *scales, found, query_epsilon, key_epsilon)
    return found
