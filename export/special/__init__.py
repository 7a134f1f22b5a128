"""What single families need to be traced: a file named after the model type, with a context manager `ready(model)`."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any


@contextmanager
def ready_to_trace(model: Any) -> Iterator[None]:
    """Prepare the model as its family's file says, if there is one, until the block ends."""
    name = f"{__package__}.{model.config.model_type.replace('-', '_')}"
    if find_spec(name) is None:
        yield
        return
    with import_module(name).ready(model):
        yield
