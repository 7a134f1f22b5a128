"""Attend as XGLM does, and look its positions up in the table that it has: it would ask whether that is long enough.

The factor of its embedding would be another number as a half-precision constant.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.models.xglm.modeling_xglm import XGLMAttention, XGLMSinusoidalPositionalEmbedding

from ..tracing.swapping import Factor, swapped
from .attending import asked, with_attention


def attend(self: Any, hidden: Tensor, attention_mask: Tensor, cache: Any, **_: Any) -> tuple[Tensor, None]:
    query, key, value = (
        project(hidden).unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2)
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    key, value = cache.update(key, value, self.layer_idx)
    return self.out_proj(asked(self, query, key, value, attention_mask, scaling=self.scaling)), None


def look_up(self: Any, positions: Tensor, _: int) -> Tensor:
    found: Tensor = self.weights[positions + self.offset]
    return found


@contextmanager
def ready(model: Any) -> Iterator[None]:
    embedding = model.get_input_embeddings()
    with (
        with_attention(model, XGLMAttention, forward=attend),
        swapped(XGLMSinusoidalPositionalEmbedding, forward=look_up),
        swapped(embedding, embed_scale=Factor(embedding.embed_scale)),
    ):
        yield
