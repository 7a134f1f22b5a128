"""Rotate Llama 4 by real numbers, and scale the queries of layers that do not rotate by their positions."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.models.llama4 import modeling_llama4

from ..tracing.cache import OPSET
from ..tracing.swapping import swapped


@contextmanager
def ready(model: Any) -> Iterator[None]:
    rotary = model.model.rotary_emb
    positions: Tensor

    def angles(hidden: Tensor, position_ids: Tensor) -> Tensor:  # [B, S, D / 2, 2]
        nonlocal positions
        positions = position_ids
        each = position_ids[..., None].float() * rotary.inv_freq.float()
        found: Tensor = torch.stack((each.cos(), each.sin()), -1) * rotary.attention_scaling
        return found

    def scaled(attention: Any, query: Tensor) -> Tensor:  # [B, S, heads · D]
        steps = torch.floor((positions.float() + 1.0) / attention.floor_scale)
        factors: Tensor = torch.log1p(steps) * attention.attn_scale + 1.0
        return (query * factors[..., None]).to(query.dtype)

    with ExitStack() as stack:
        stack.enter_context(swapped(rotary, forward=angles))
        stack.enter_context(swapped(modeling_llama4, apply_rotary_emb=_rotated))
        stack.enter_context(swapped(masking_utils, chunked_causal_mask_function=_in_one_chunk))
        for layer in model.model.layers:
            attention = layer.self_attn
            if attention.attn_temperature_tuning and not attention.use_rope:
                stack.enter_context(swapped(attention, attn_temperature_tuning=False))
                hook = attention.q_proj.register_forward_hook(
                    lambda _projection, _given, query, attention=attention: scaled(attention, query)
                )
                stack.callback(hook.remove)
        yield


def _in_one_chunk(size: int, _: Tensor) -> Callable[..., Tensor]:
    """Let tokens see those before them in their own chunk of so many positions, none of which is negative."""

    def chunk(places: Tensor) -> Tensor:  # torch's own division has a sign in mind
        sizes = torch.tensor(size)
        return torch.onnx.ops.symbolic("Div", [places, sizes], dtype=places.dtype, shape=places.shape, version=OPSET)

    def seen(_batch: None, _head: None, own: Tensor, other: Tensor) -> Tensor:
        return (chunk(own) == chunk(other)) & (other <= own)

    return seen


def _rotated(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Turn pairs of numbers that lie side by side [B, S, heads, D]."""
    cos, sin = angles[:, :, None].unbind(-1)

    def turn(each: Tensor) -> Tensor:
        first, second = each.float().view(*each.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack((first * cos - second * sin, first * sin + second * cos), -1)
        return turned.flatten(-2).type_as(each)

    return turn(query), turn(key)
