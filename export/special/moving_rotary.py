"""Keep rotary frequencies as they are for short texts: a bundle has no text for which they would be others."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..tracing.swapping import swapped

MOVING = ("dynamic", "longrope")


@contextmanager
def ready(model: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for module in model.modules():
            if getattr(module, "rope_type", None) in MOVING:  # by which it knows whether to look at the text's length
                stack.enter_context(swapped(module, rope_type="default"))
                module.inv_freq.copy_(module.original_inv_freq)
        yield
