"""Rotate DeepSeek-V2's positions without complex numbers, which ONNX does not have: each is kept as cosine and sine."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as modeling


def angles(rotary: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """Return cosines and sines [2, B, S, D / 2] in place of complex numbers."""
    turned = position_ids[:, :, None].float() * rotary.inv_freq.float()
    pair: Tensor = torch.stack([turned.cos(), turned.sin()]) * rotary.attention_scaling
    return pair


def rotated(query: Tensor, key: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Turn neighbouring numbers of queries and keys [B, heads, S, D] as pairs."""
    cos, sin = (part[:, None] for part in turned)

    def turn(x: Tensor) -> Tensor:
        even, odd = x.float()[..., 0::2], x.float()[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(3).type_as(x)

    return turn(query), turn(key)


@contextmanager
def ready(_: Any) -> Iterator[None]:
    rotary = modeling.DeepseekV2RotaryEmbedding
    before = rotary.forward, modeling.apply_rotary_emb
    rotary.forward, modeling.apply_rotary_emb = angles, rotated
    try:
        yield
    finally:
        rotary.forward, modeling.apply_rotary_emb = before
