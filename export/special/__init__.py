"""What single families need to be traced: a file named after the model type, with a context manager `ready(model)`.

Latent attention, which many have, is a file of its own.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from torch import nn
from transformers.activations import NewGELUActivation

from . import latents


@contextmanager
def ready_to_trace(model: Any) -> Iterator[None]:
    """Prepare the model as its family's file says, if there is one, until the block ends."""
    name = f"{__package__}.{model.config.model_type.replace('-', '_')}"
    with ExitStack() as stack:
        stack.enter_context(_one_gelu())
        if find_spec(name) is not None:
            stack.enter_context(import_module(name).ready(model))
        if getattr(model.config, "kv_lora_rank", None):
            stack.enter_context(latents.ready(model))
        yield


@contextmanager
def _one_gelu() -> Iterator[None]:
    """Trace GPT2's own GELU as torch's, which is one node and whose numbers no dtype rounds."""
    forward = NewGELUActivation.forward
    NewGELUActivation.forward = lambda self, x: nn.functional.gelu(x, approximate="tanh")
    try:
        yield
    finally:
        NewGELUActivation.forward = forward
