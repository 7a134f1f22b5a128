"""Make single families ready to be traced: a file named after the model type, with a context manager `ready(model)`.

What many have is a file of its own: latent attention, rotary scaling by the text's length, gates.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ..tracing.modules import as_nodes
from . import gates, latents, moving_rotary


@contextmanager
def ready_to_trace(model: Any) -> Iterator[None]:
    """Let the model's attention be one ONNX node, and prepare it as its family's file says, until the block ends."""
    with ExitStack() as stack:
        stack.enter_context(as_nodes(model))
        if (family := _file_of(model)) is not None:
            stack.enter_context(family.ready(model))
        if getattr(model.config, "kv_lora_rank", None):
            stack.enter_context(latents.ready(model))
        stack.enter_context(moving_rotary.ready(model))
        stack.enter_context(gates.ready(model))
        yield


def mend(model: Any) -> None:
    """Give a model that was loaded the numbers which its family works out, if its file says that they get lost."""
    family = _file_of(model)
    if family is not None and hasattr(family, "mend"):
        family.mend(model)


def _file_of(model: Any) -> Any:
    name = f"{__package__}.{model.config.model_type.replace('-', '_')}"
    return None if find_spec(name) is None else import_module(name)
