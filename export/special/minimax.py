"""Let MiniMax's lightning attention ask the cache: its decays are constant, and it keeps keys and values of tokens."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.models.minimax import modeling_minimax as modeling

from ..tracing.recurrent import RecurrentCache
from ..tracing.swapping import swapped


def answered(layer: Any, hidden_states: Tensor, *, cache: RecurrentCache, **_: Any) -> tuple[Tensor, None]:
    heads, size, number = layer.num_attention_heads, layer.head_dim, layer.layer_idx
    made = layer.act_fn(layer.qkv_proj(hidden_states))
    query, own = torch.split(made.view(*made.shape[:2], heads, 3 * size), [size, 2 * size], 3)
    inputs, state = f"inputs_{number}", f"state_{number}"
    cache.kept[inputs], every = cache.entries.kept(cache.kept[inputs], own.flatten(2))
    by_head = every.view(*every.shape[:2], heads, 2 * size).transpose(1, 2).float()
    keys, values = torch.split(by_head, size, 3)  # [B, heads, N, size]
    decays = -layer.slope_rate.expand(*keys.shape[:3], 1)
    answer, cache.kept[state] = cache.attend(
        query.transpose(1, 2).float(), keys, values, decays, None, cache.kept[state]
    )
    found = layer.norm(answer.transpose(1, 2).flatten(2).to(hidden_states.dtype))
    return layer.out_proj(layer.output_gate(hidden_states).sigmoid() * found), None


def mend(model: Any) -> None:
    """Work out the decays anew in float32: as weights they are rounded to what is stored, each table by itself."""
    for layer in model.modules():
        if isinstance(layer, modeling.MiniMaxLightningAttention):
            layer.slope_rate = layer.get_slope_rate()
            layer.query_decay, layer.key_decay, layer.diagonal_decay = layer.decay_factors(layer.slope_rate)


@contextmanager
def ready(_: Any) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(swapped(modeling.MiniMaxLightningAttention, forward=answered))
        stack.enter_context(swapped(modeling, MiniMaxCache=Cache))  # it takes no other
        yield
