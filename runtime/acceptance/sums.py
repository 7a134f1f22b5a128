"""Sums of weights up to each token, which no order of additions can make fall or rise where nothing is added."""

import torch
from torch import Tensor

from ..state.place import on_host


def rising_sums(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of all weights [A, …, V] up to each token: the last is the largest, none exceeds the one after it.

    A token without weight has the sum of the token before it. A CPU adds weights one after another, so that this holds
    for any sums that it makes; a GPU adds them in blocks, where rounding differs from one to the next.
    """
    if on_host(weights.device):
        return weights.cumsum(-1, dtype=dtype)
    sums = weights.cumsum(-1, dtype=torch.float64)
    return torch.where(weights > 0, sums, 0.0).cummax(-1).values.to(dtype)
