"""Cut Gemma 3n's gates off by a number that is known before, divide by no rounded root, and rotate as Gemma 4 does."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers.models.gemma3n import modeling_gemma3n

from ..tracing.swapping import Factor, swapped
from . import gemma4_text


@contextmanager
def ready(model: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for layer in model.model.layers:
            stack.enter_context(swapped(layer.mlp, _gaussian_topk=_cut_off(layer.mlp.activation_sparsity)))
        roots = SimpleNamespace(sqrt=lambda number: Factor(math.sqrt(number)))
        stack.enter_context(swapped(modeling_gemma3n, math=roots))
        stack.enter_context(gemma4_text.ready(model))
        yield


def _cut_off(share: float) -> Any:
    """Leave of each token the numbers above those of this share, if they are spread normally."""
    deviations = NormalDist().inv_cdf(share) if share else 0.0

    def kept(gate: Tensor) -> Tensor:
        wide = gate.float()
        mean = wide.mean(-1, keepdim=True)
        spread = (wide - mean).square().mean(-1, keepdim=True).sqrt()
        return nn.functional.relu(wide - (mean + spread * deviations)).to(gate.dtype)

    return kept
