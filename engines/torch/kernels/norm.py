"""Root-mean-square norms, alone or with the residual that is added before or after."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .declare import declare


def normed(x: Tensor, scale: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """Norm the last axis in the type of `scale`, and give it in another."""
    return F.rms_norm(x.to(scale.dtype), scale.shape, scale, epsilon).to(dtype)


def _add_norm(
    residual: Tensor,
    x: Tensor,
    scale: Tensor,
    first: Tensor | None,
    epsilon: float,
    dtype: torch.dtype,
    first_epsilon: float = 0.0,
    first_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Norm `x` if there is a `first` scale, add the residual, and norm the sum; give the sum, too."""
    total = residual + (x if first is None else normed(x, first, first_epsilon, first_dtype or x.dtype))
    return total, normed(total, scale, epsilon, dtype)


def _norm_add(residual: Tensor, x: Tensor, scale: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    return residual + normed(x, scale, epsilon, dtype)


def _like(x: Tensor, *types: torch.dtype) -> Tensor:
    dtype = types[0] if len(types) == 1 else torch.promote_types(*types)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


norm = declare(
    "norm",
    "(Tensor x, Tensor scale, float epsilon, ScalarType dtype) -> Tensor",
    lambda x, scale, epsilon, dtype: _like(x, dtype),
    normed,
)
_added_and_normed = declare(
    "add_norm",
    "(Tensor residual, Tensor x, Tensor scale, Tensor? first, float epsilon, ScalarType dtype,"
    " float first_epsilon=0.0, ScalarType? first_dtype=None) -> (Tensor, Tensor)",
    lambda residual, x, scale, first, epsilon, dtype, first_epsilon=0.0, first_dtype=None: (
        _like(residual, residual.dtype, first_dtype or x.dtype),
        _like(residual, dtype),
    ),
    _add_norm,
)
_normed_and_added = declare(
    "norm_add",
    "(Tensor residual, Tensor x, Tensor scale, float epsilon, ScalarType dtype) -> Tensor",
    lambda residual, x, scale, epsilon, dtype: _like(residual, residual.dtype, dtype),
    _norm_add,
)


def add_norm(residual: Tensor, x: Tensor, scale: Tensor, first: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    whole = residual.shape == x.shape  # else torch repeats one of them
    found: tuple[Tensor, Tensor] = (_added_and_normed if whole else _add_norm)(residual, x, scale, first, **options)
    return found


def norm_add(residual: Tensor, x: Tensor, scale: Tensor, **options: Any) -> Tensor:
    found: Tensor = (_normed_and_added if residual.shape == x.shape else _norm_add)(residual, x, scale, **options)
    return found
