"""What is said where memory runs out: what takes it, and what would take less."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ...engines import Bundle, EngineError
from ...engines.errors import first_line


@contextmanager
def memory_shortage(bundle: Bundle, rows: int) -> Iterator[None]:
    """Explain a lack of memory to whoever asked for so many rows of this bundle."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        # On the CPU torch says so with a plain RuntimeError.
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "alloc" not in str(error):
            raise
        weights = sum(map(bundle.weight_bytes, bundle.models)) / 2**20
        per_token = sum(model.contract.cache_bytes_per_token for model in bundle.models.values()) / 2**20
        raise EngineError(
            f"no memory is left ({first_line(error)}): weights take {weights:,.0f} MiB, caches up to "
            f"{per_token * rows * bundle.capacity:,.0f} MiB for {rows} rows of {bundle.capacity} tokens, and the "
            "engine needs a workspace; lower max_batch, or export with a shorter --max-length or smaller weights"
        ) from error
