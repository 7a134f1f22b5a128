"""The two kernels of attention over a cache: one reads a part of the entries, the other puts the parts together.

A row's sums are made in an order that the capacity alone decides: its bits are the same beside any others.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from ..attention import LEAST_PART, MOST_PARTS

ROWS = 16  # queries a program, the least of a product in hardware
MOST_ENTRIES, BLOCK_BYTES = 64, 16384  # of a product, so that three blocks of keys and of values fit beside one another
INTERPRETED = knobs.runtime.interpret


@triton.jit
def product(a, b, WIDEN: tl.constexpr):
    """Multiply with sums in float32; the interpreter has no products in bfloat16, and wide ones are equal."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def capped(scores, softcap):
    """Return `softcap * tanh(scores / softcap)`, where the tangent is small by its series, which cancels nothing."""
    x = scores / softcap
    shrunk = tl.exp(-2.0 * tl.abs(x))
    far = tl.where(x < 0, -1.0, 1.0) * (1.0 - shrunk) / (1.0 + shrunk)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    return softcap * tl.where(tl.abs(x) < 0.25, near, far)


@triton.jit
def first_seen(position, before_tail, WINDOW: tl.constexpr):
    """Return the first entry that a token at this position may see; of a tail it may see any."""
    if WINDOW:
        return tl.maximum(tl.minimum(position - WINDOW + 1, before_tail), 0)
    return position * 0


@triton.jit
def attend_part(
    query,  # [B, heads, S, D]
    key,  # [B, kv_heads, T, D]
    value,  # [B, kv_heads, T, V]
    start,  # [B]
    depths,  # [B, W]
    ancestors,  # [B, S, W]
    sums,  # [B, heads, S, parts, V]: the weighted values of each part,
    peaks,  # [B, heads, S, parts]: its highest score,
    totals,  # [B, heads, S, parts]: and its weights, which count from that
    scale,
    softcap,
    width,
    tail,
    capacity,
    kv_heads,
    parts,
    query_batch,
    query_head,
    query_token,
    key_batch,
    key_head,
    key_entry,
    value_batch,
    value_head,
    value_entry,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    WIDEN: tl.constexpr,
):
    tile, part, of = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    batch, kv_head = (of // kv_heads).to(tl.int64), (of % kv_heads).to(tl.int64)
    first = tl.load(start + batch).to(tl.int32)
    before_tail = first - (tail - width)
    row = tile * ROWS + tl.arange(0, ROWS)  # heads that share a key head are rows beside one another
    token, head = row // GROUP, kv_head * GROUP + row % GROUP
    asked = token < width
    own = tl.load(depths + batch * tail + (tail - width) + token, mask=asked, other=2**30).to(tl.int32)
    position = first + own
    lowest = first_seen(tl.min(position, 0), before_tail, WINDOW)
    begin = tl.maximum(part * PART, lowest // BLOCK * BLOCK)
    end = tl.minimum(tl.minimum(first + width, capacity), part * PART + PART)
    if begin < end:
        place, value_place = tl.arange(0, PADDED), tl.arange(0, VALUE_PADDED)
        queries = tl.load(
            query + batch * query_batch + head[:, None] * query_head + token[:, None] * query_token + place[None, :],
            mask=asked[:, None] & (place < SIZE)[None, :],
            other=0.0,
        )
        keys_at = key + batch * key_batch + kv_head * key_head + place[:, None]
        values_at = value + batch * value_batch + kv_head * value_head + value_place[None, :]
        tail_at = ancestors + (batch * width + token[:, None]) * tail
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        found = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
        for block in range(begin, end, BLOCK):
            entry = block + tl.arange(0, BLOCK)
            alive = (entry >= lowest) & (entry < end)
            keys = tl.load(
                keys_at + entry[None, :] * key_entry, mask=alive[None, :] & (place < SIZE)[:, None], other=0.0
            )
            scores = product(queries, keys, WIDEN) * scale
            if CAPPED:
                scores = capped(scores, softcap)
            within = entry - before_tail  # the place of each among those that the call lists
            listed = (within >= 0) & alive
            below = tl.load(tail_at + within[None, :], mask=asked[:, None] & listed[None, :], other=0)
            seen = alive[None, :] & ((within < 0)[None, :] | (below != 0))
            if WINDOW:
                depth = tl.load(depths + batch * tail + within, mask=listed, other=0).to(tl.int32)
                at = tl.where(listed, first + depth, entry)
                seen = seen & (at[None, :] <= position[:, None]) & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # of a row that has seen nothing yet
            weights = tl.exp(scores - base[:, None])
            kept = tl.exp(peak - base)
            total = total * kept + tl.sum(weights, 1)
            values = tl.load(
                values_at + entry[:, None] * value_entry,
                mask=alive[:, None] & (value_place < VALUE_SIZE)[None, :],
                other=0.0,
            )
            found = found * kept[:, None] + product(weights.to(values.dtype), values, WIDEN)
            peak = higher
        at_part = ((batch * kv_heads * GROUP + head) * width + token) * parts + part
        tl.store(peaks + at_part, peak, mask=asked)
        tl.store(totals + at_part, total, mask=asked)
        tl.store(
            sums + at_part[:, None] * VALUE_SIZE + value_place[None, :],
            found,
            mask=asked[:, None] & (value_place < VALUE_SIZE)[None, :],
        )


@triton.jit
def join_parts(
    sums,
    peaks,
    totals,
    start,
    depths,
    sinks,  # [heads], a score each that has no value
    attended,  # [B, S, heads, V]
    width,
    tail,
    capacity,
    heads,
    parts,
    VALUE_SIZE: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
):
    row, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    head, token = row // width, row % width
    first = tl.load(start + batch).to(tl.int32)
    own = tl.load(depths + batch * tail + (tail - width) + token).to(tl.int32)
    lowest = first_seen(first + own, first - (tail - width), WINDOW)
    end = tl.minimum(first + width, capacity)
    part, place = tl.arange(0, PARTS), tl.arange(0, VALUE_PADDED)
    alive = (part * PART < end) & (part * PART + PART > lowest)
    at_part = ((batch * heads + head) * width + token) * parts + part
    peaks_of = tl.load(peaks + at_part, mask=alive, other=float("-inf"))
    peak = tl.max(peaks_of, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        peak = tl.maximum(peak, sink)
    share = tl.exp(peaks_of - peak)
    total = tl.sum(tl.load(totals + at_part, mask=alive, other=0.0) * share, 0)
    if SINKS:
        total += tl.exp(sink - peak)
    of_value = (place < VALUE_SIZE)[None, :]
    found = tl.load(sums + at_part[:, None] * VALUE_SIZE + place[None, :], mask=alive[:, None] & of_value, other=0.0)
    answer = tl.sum(found * share[:, None], 0) / total
    tl.store(
        attended + ((batch * width + token) * heads + head) * VALUE_SIZE + place,
        answer.to(attended.dtype.element_ty),
        mask=place < VALUE_SIZE,
    )


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    start: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    sinks: Tensor | None,
    scale: float,
    softcap: float,
    window: int,
) -> Tensor:
    (batch, heads, width, size), (_, kv_heads, capacity, value_size) = query.shape, value.shape
    part = max(LEAST_PART, triton.cdiv(capacity, MOST_PARTS * MOST_ENTRIES) * MOST_ENTRIES)
    parts = triton.cdiv(capacity, part)
    shared = heads // kv_heads
    depths, ancestors, start = depths.contiguous(), ancestors.contiguous(), start.contiguous()
    query, key, value = (one if one.stride(3) == 1 else one.contiguous() for one in (query, key, value))
    tail, padded = ancestors.shape[2], [max(16, triton.next_power_of_2(one)) for one in (size, value_size)]
    peaks, totals = query.new_empty((2, batch, heads, width, parts), dtype=torch.float32)
    sums = query.new_empty((batch, heads, width, parts, value_size), dtype=torch.float32)
    attended = query.new_empty((batch, width, heads, value_size))
    attend_part[(triton.cdiv(width * shared, ROWS), parts, batch * kv_heads)](
        *(query, key, value, start, depths, ancestors, sums, peaks, totals),
        *(scale, softcap or 1.0, width, tail, capacity, kv_heads, parts),
        *(*query.stride()[:3], *key.stride()[:3], *value.stride()[:3]),
        GROUP=shared,
        SIZE=size,
        VALUE_SIZE=value_size,
        PADDED=padded[0],
        VALUE_PADDED=padded[1],
        ROWS=ROWS,
        BLOCK=max(16, min(MOST_ENTRIES, BLOCK_BYTES // (max(padded) * key.element_size()))),
        PART=part,
        WINDOW=window,
        CAPPED=softcap > 0,
        WIDEN=INTERPRETED,
    )
    join_parts[(heads * width, batch)](
        *(sums, peaks, totals, start, depths, sinks if sinks is not None else peaks, attended),
        *(width, tail, capacity, heads, parts),
        VALUE_SIZE=value_size,
        VALUE_PADDED=padded[1],
        PARTS=MOST_PARTS,
        PART=part,
        WINDOW=window,
        SINKS=sinks is not None,
    )
    return attended.transpose(1, 2)
