"""Keep the factor of PhiMoE's rotary numbers as it is for short texts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding


@contextmanager
def ready(model: Any) -> Iterator[None]:
    moving = [module for module in model.modules() if isinstance(module, PhimoeRotaryEmbedding)]
    moving = [rotary for rotary in moving if "short_mscale" in rotary.config.rope_parameters]
    before = [(rotary, rotary.config.rope_parameters, rotary.rope_init_fn) for rotary in moving]
    for rotary, parameters, _ in before:
        still = rotary.original_inv_freq, parameters["short_mscale"]
        rotary.config.rope_parameters = parameters | {"rope_type": "default"}
        rotary.rope_init_fn = lambda _, still=still: still
    try:
        yield
    finally:
        for rotary, parameters, function in before:
            rotary.config.rope_parameters, rotary.rope_init_fn = parameters, function
