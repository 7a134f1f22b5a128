"""Attend as MPT does, whose entries count less the farther they are before a token."""

from contextlib import AbstractContextManager
from functools import partialmethod
from typing import Any

from torch import Tensor
from transformers.models.mpt import modeling_mpt as modeling

from .attending import alibi, asked, with_attention


def attend(
    self: Any, hidden: Tensor, *, attention_mask: Tensor, cache: Any, slopes: Tensor, **_: Any
) -> tuple[Tensor, None]:
    mixed = self.Wqkv(hidden)
    if self.clip_qkv:
        mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
    query, key, value = mixed.unflatten(2, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
    key, value = cache.update(key, value, self.layer_idx)
    bias = alibi(slopes, cache.places, key)
    found = asked(self, query, key, value, attention_mask, scaling=self.softmax_scale, position_bias=bias)
    return self.out_proj(found), None


def ready(model: Any) -> AbstractContextManager[None]:
    slopes = -modeling.build_mpt_alibi_tensor(model.config.n_heads, 2)[:, 0, 0]  # of the entry before a token
    return with_attention(model, modeling.MptAttention, forward=partialmethod(attend, slopes=slopes))
