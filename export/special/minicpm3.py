"""Scale MiniCPM3's residual branches in float32: its factor would be another number as a half-precision constant."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..tracing.swapping import Factor


@contextmanager
def ready(model: Any) -> Iterator[None]:
    layers = list(model.model.layers)
    before, factor = layers[0].residual_scale, Factor(layers[0].residual_scale)  # the same in all layers
    for layer in layers:
        layer.residual_scale = factor
    try:
        yield
    finally:
        for layer in layers:
            layer.residual_scale = before
