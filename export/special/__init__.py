"""Make single families ready to be traced: a file named after the model type, with a context manager `ready(model)`.

What many have is a file of its own: latent attention, rotary scaling by the text's length, gates.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from . import gates, latents, moving_rotary


@contextmanager
def ready_to_trace(model: Any) -> Iterator[None]:
    """Prepare the model as its family's file says, if there is one, until the block ends."""
    name = f"{__package__}.{model.config.model_type.replace('-', '_')}"
    with ExitStack() as stack:
        if find_spec(name) is not None:
            stack.enter_context(import_module(name).ready(model))
        if getattr(model.config, "kv_lora_rank", None):
            stack.enter_context(latents.ready(model))
        stack.enter_context(moving_rotary.ready(model))
        stack.enter_context(gates.ready(model))
        yield
