"""Keep rotary frequencies as they are for short texts: a bundle has no text for which they would be others."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MOVING = ("dynamic", "longrope")


@contextmanager
def ready(model: Any) -> Iterator[None]:
    moving = [(module, module.rope_type) for module in model.modules() if hasattr(module, "rope_type")]
    moving = [(rotary, kind) for rotary, kind in moving if kind in MOVING]
    for rotary, _ in moving:
        rotary.rope_type = "default"  # by which transformers knows whether to look at the text's length
        rotary.inv_freq.copy_(rotary.original_inv_freq)
    try:
        yield
    finally:
        for rotary, kind in moving:
            rotary.rope_type = kind
