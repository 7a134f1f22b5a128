"""Attend as the Japanese GPT-NeoX does, by the node that is traced."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from transformers.models.gpt_neox_japanese.modeling_gpt_neox_japanese import GPTNeoXJapaneseAttention

from ..tracing.modules import attention
from .attending import with_attention


def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, None]:
    found, _ = attention(self, query, key, value, mask, scaling=1 / self.norm_factor)
    return found.transpose(1, 2), None  # [B, heads, S, D]


def ready(model: Any) -> AbstractContextManager[None]:
    return with_attention(model, GPTNeoXJapaneseAttention, _attn=attend)
