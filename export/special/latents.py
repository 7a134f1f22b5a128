"""Latent attention (MLA): what is kept of a token is one latent, and one rotary key, for all heads.

Transformers expands the latents of all tokens to keys and values in every step. The graph asks the latents themselves:
the projection that would make keys of them is applied to the query, that which would make values to what was found.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Absorbed(nn.Module):
    """The projections of one layer, by head."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.plain, self.rank = attention.qk_nope_head_dim, attention.kv_lora_rank
        each = attention.kv_b_proj.weight.detach().view(-1, self.plain + attention.v_head_dim, self.rank)
        keys, values = each.split([self.plain, attention.v_head_dim], 1)
        self.keys = nn.Parameter(keys.contiguous(), requires_grad=False)  # [heads, plain, rank]
        self.values = nn.Parameter(values.transpose(1, 2).contiguous(), requires_grad=False)  # [heads, rank, D]

    def asked(self, query: Tensor) -> Tensor:
        """Turn queries [B, heads, S, plain + rotary] into those of latents [B, heads, S, rank + rotary]."""
        return torch.cat([query[..., : self.plain] @ self.keys, query[..., self.plain :]], -1)

    def answered(self, found: Tensor) -> Tensor:
        """Turn what was found [B, heads, S, rank + rotary] into values [B, heads, S, D]; its latents alone count."""
        return found[..., : self.rank] @ self.values


def as_latents(latents: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is asked, and what is found there; TensorRT takes no values of another size than keys."""
    kept = torch.cat([latents, rotary], -1)
    return kept, kept


@contextmanager
def ready(model: Any) -> Iterator[None]:
    layers = [module for module in model.modules() if hasattr(module, "expand_kv")]
    for attention in layers:
        attention.expand_kv = as_latents
        attention.absorbed = Absorbed(attention)
    try:
        yield
    finally:
        for attention in layers:
            del attention.expand_kv, attention.absorbed
