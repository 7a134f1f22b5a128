"""Keep the factor of PhiMoE's rotary numbers as it is for short texts."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from ..tracing.swapping import swapped


@contextmanager
def ready(model: Any) -> Iterator[None]:
    parameters = model.config.rope_parameters
    with ExitStack() as stack:
        for rotary in model.modules():
            if isinstance(rotary, PhimoeRotaryEmbedding) and "short_mscale" in parameters:
                still = rotary.original_inv_freq, parameters["short_mscale"]
                stack.enter_context(swapped(rotary, rope_init_fn=lambda _, still=still: still))
                stack.enter_context(swapped(model.config, rope_parameters=parameters | {"rope_type": "default"}))
        yield
