"""Attention as torch's own operations, and the mask of what a token sees."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def first_numbers(count: int, *shape: int) -> Tensor:
    """Return the same tensor for each call, so that it is kept once and what follows from it is computed once."""
    return torch.arange(count).view(shape)


def seen_entries(start: Tensor, depths: Tensor, ancestors: Tensor, capacity: int, window: int) -> Tensor:
    """Say which entries each token sees [B, 1, S, T]: of those that the call gets, as their ancestors say.

    A window counts positions, the token's own among them; 0 is none.
    """
    width, listed = ancestors.shape[1:]
    entries = first_numbers(capacity, 1, -1)
    places = start[:, None] + (width - listed) + first_numbers(listed, -1)  # [B, W]
    earlier = (entries < start[:, None])[:, None].expand(-1, width, -1)
    seen = earlier.scatter(2, places[:, None].expand(-1, width, -1), ancestors)
    if window:
        positions = start[:, None] + depths
        own = positions[:, listed - width :, None]  # [B, S, 1]
        of_entries = entries.expand(start.shape[0], -1).scatter(1, places, positions)[:, None]  # [B, 1, T]
        seen = seen & (of_entries <= own) & (of_entries > own - window)
    return seen[:, None]


def attention(
    query: Tensor,  # [B, heads, S, D]
    key: Tensor,  # [B, kv_heads, T, D]
    value: Tensor,  # [B, kv_heads, T, D]
    mask: Tensor | None = None,  # [B, 1, S, T], or what is added to the scores of each head [B or 1, heads, S, T]
    scale: float | None = None,
    softcap: float = 0.0,
) -> Tensor:
    (batch, heads, width, size), kv_heads = query.shape, key.shape[1]
    scale = size**-0.5 if scale is None else scale
    if mask is None:
        if softcap or heads != kv_heads:
            raise ValueError("attention has no mask, expected one where heads share keys or scores are capped")
        return F.scaled_dot_product_attention(query, key, value, scale=scale)
    if mask.dtype == torch.bool and mask.shape[1] == 1:
        mask = torch.where(mask, 0.0, -torch.inf)
    elif mask.dtype != query.dtype or mask.shape[1] != heads:
        expected = f"bool [B, 1, S, T] or {query.dtype} [B, {heads}, S, T]"
        raise ValueError(f"attention has a mask {mask.dtype} {list(mask.shape)}, expected {expected}")
    hidden = _as(mask.expand(batch, -1, -1, -1), torch.float32 if softcap else query.dtype)
    if heads != kv_heads:  # heads that share a key head become more rows of one, so no kernel copies the cache
        query = query.reshape(batch, kv_heads, -1, size)
        if hidden.shape[1] == heads:
            hidden = hidden.reshape(batch, kv_heads, -1, hidden.shape[3])
        else:
            hidden = hidden.repeat(1, 1, heads // kv_heads, 1)
    if softcap:
        scores = _as(torch.matmul(query * scale, key.transpose(2, 3)), torch.float32)
        weights = torch.softmax(torch.tanh(scores / softcap) * softcap + hidden, -1)
        found = torch.matmul(_as(weights, value.dtype), value)
    else:
        found = F.scaled_dot_product_attention(query, key, value, hidden, scale=scale)
    return found if heads == kv_heads else found.reshape(batch, heads, width, -1)


def left_by_sinks(query: Tensor, key: Tensor, mask: Tensor, scale: float, sinks: Tensor) -> Tensor:
    """Return the share of attention [B, heads, S, 1] that sinks leave: a score a head that has no value."""
    (batch, heads, width, size), kv_heads = query.shape, key.shape[1]
    rows = query.float().reshape(batch, kv_heads, -1, size) * scale
    scores = torch.matmul(rows, key.float().transpose(2, 3)).reshape(batch, heads, width, -1)
    all_seen = torch.logsumexp(torch.where(mask, scores, -torch.inf), -1, keepdim=True)
    return torch.sigmoid(all_seen - sinks.float().reshape(-1, 1, 1)).to(query.dtype)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)
