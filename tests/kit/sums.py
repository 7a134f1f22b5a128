"""A device that adds each block by itself, then what lies before it, as those do that add in parallel."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from trt_spec.runtime.state import place

one_by_one = Tensor.cumsum


@contextmanager
def adding_in_blocks(size: int) -> Iterator[None]:
    def cumsum(tensor: Tensor, dim: int, **options: Any) -> Tensor:
        assert dim in (-1, tensor.dim() - 1)
        parts = [one_by_one(part, -1, **options) for part in tensor.split(size, -1)]
        wholes = torch.stack([part[..., -1] for part in parts], -1)
        before = [wholes[..., :end].sum(-1, keepdim=True) for end in range(len(parts))]
        return torch.cat([part + more for part, more in zip(parts, before, strict=True)], -1)

    with patch.object(Tensor, "cumsum", cumsum), patch.object(place, "HOSTS", set()):
        yield
