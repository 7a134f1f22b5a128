"""Numbers of eight bits that stand for keys and values: each head of each token has a scale of its own.

The graph and what it is checked against compute with the same functions. To round twice is to round once.
"""

import torch
from torch import Tensor

from ...engines import EIGHT_BITS


def narrowed(entries: Tensor, dtype: torch.dtype, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return entries [B, heads, S, size] in eight bits, and their scales [B, heads, S, 1]."""
    wide, most = entries.float(), EIGHT_BITS[str(dtype).removeprefix("torch.")]
    scale = (wide.abs().amax(-1, keepdim=True) / most).clamp(min=torch.finfo(scale_dtype).tiny).to(scale_dtype)
    parts = wide / scale.float()  # the scale is rounded by now, which may put the largest beyond the last number
    parts = parts if dtype.is_floating_point else parts.round()
    return parts.clamp(-most, most).to(dtype), scale


def widened(narrow: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the entries that numbers of eight bits and their scales stand for."""
    return (narrow.float() * scale.float()).to(dtype)
