"""Attend as Falcon does, with keys once for all heads that share them: transformers keeps them once for each head."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from transformers.models.falcon import modeling_falcon as modeling

from ..families.shape import kv_heads_of
from ..tracing.swapping import swapped
from .attending import asked, positions_of, with_attention


def attend(
    self: Any,
    hidden: Tensor,
    *,
    attention_mask: Tensor,
    layer_past: Any,
    position_embeddings: tuple[Tensor, Tensor],
    kv_heads: int,
    biases: Tensor | None,  # [heads, positions]
    **_: Any,
) -> tuple[Tensor, None]:
    each = self.num_heads // kv_heads + 2  # the queries that share a key and a value, and these
    fused = self.query_key_value(hidden).unflatten(2, (kv_heads, each, self.head_dim)).transpose(1, 2)
    query = fused[:, :, :, :-2].transpose(2, 3).flatten(1, 2)  # [B, heads, S, D]
    key, value = fused[:, :, :, -2], fused[:, :, :, -1]  # [B, kv_heads, S, D]
    if biases is None:
        query, key = modeling.apply_rotary_pos_emb(query, key, *position_embeddings)
    key, value = layer_past.update(key, value, self.layer_idx)
    bias = None
    if biases is not None:  # of entries by their own positions, rounded as those are which it was trained with
        positions = positions_of(layer_past.places, key).clamp(max=biases.shape[1] - 1)  # [B, T]
        bias = biases[:, positions].transpose(0, 1)[:, :, None].to(key.dtype)  # [B, heads, 1, T]
    return self.dense(asked(self, query, key, value, attention_mask, position_bias=bias)), None


@contextmanager
def ready(model: Any) -> Iterator[None]:
    config, biases = model.config, None
    if config.alibi:
        every = torch.ones(1, config.max_position_embeddings, dtype=torch.int64)
        biases = modeling.build_alibi_tensor(every, config.num_attention_heads, torch.float32)[:, 0]
        biases = biases / sqrt(config.head_dim)
    forward = partialmethod(attend, kv_heads=kv_heads_of(config), biases=biases)
    with with_attention(model, modeling.FalconAttention, forward=forward), swapped(model.transformer, use_alibi=False):
        yield
