"""Draw tokens by sums of weights that never decrease, and that increase only where a weight is not 0."""

import torch
from torch import Tensor

from ..state.place import on_host

NEGLIGIBLE = 2.0**-100  # a share below the resolution of the uniforms


def rising_sums(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of all weights [A, …, V] up to each token: the last is the largest, none exceeds the one after it.

    A token without weight has the sum of the token before it. A CPU adds weights one after another, so that this holds
    for any sums that it makes; a GPU adds them in blocks, where rounding differs from one to the next.
    """
    if on_host(weights.device):
        return weights.cumsum(-1, dtype=dtype)
    sums = weights.cumsum(-1, dtype=torch.float64)
    return torch.where(weights > 0, sums, 0.0).cummax(-1).values.to(dtype)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Draw tokens [A, 1] by uniforms u [A, 1] from unnormalised weights [A, V], never a token of weight zero."""
    cumulative = rising_sums(weights, torch.float64)
    return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
