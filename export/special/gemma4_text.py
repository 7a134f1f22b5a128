"""Write Gemma 4's norms and rotations as other families do, of which each becomes one node."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..tracing.swapping import swapped


def norm(self: Any, hidden: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.eps)


@contextmanager
def ready(model: Any) -> Iterator[None]:
    modeling = sys.modules[type(model).__module__]
    rotated = modeling.apply_rotary_pos_emb

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> Tensor:
        assert unsqueeze_dim == 2, "its heads come last"
        turned: Tensor = rotated(x.transpose(1, 2), cos, sin).transpose(1, 2)  # [B, S, heads, D]
        return turned

    with swapped(modeling, apply_rotary_pos_emb=rotate), swapped(type(model.model.norm), _norm=norm):
        yield
