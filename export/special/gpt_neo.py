"""Attend as GPT-Neo does: some of its layers see a window, which its own code derives from the places of entries."""

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor
from transformers.masking_utils import sliding_window_causal_mask_function
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

from ..tracing.modules import seen_by
from .attending import asked, with_attention


def attend(self: Any, hidden: Tensor, attention_mask: Tensor, layer_past: Any, **_: Any) -> tuple[Tensor, None]:
    query, key, value = (
        self._split_heads(project(hidden), self.num_heads, self.head_dim)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    key, value = layer_past.update(key, value, self.layer_id)
    if self.attention_type == "local":
        window = sliding_window_causal_mask_function(self.config.window_size)
        attention_mask = seen_by(query.shape[2], key.shape[2], layer_past.places, window)
    return self.out_proj(asked(self, query, key, value, attention_mask, scaling=1.0)), None


def ready(model: Any) -> AbstractContextManager[None]:
    return with_attention(model, GPTNeoSelfAttention, forward=attend)
