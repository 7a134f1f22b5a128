"""Say what takes the memory where it runs out, and what would take less."""

from types import TracebackType

import torch

from ...engines import Bundle, EngineError
from ...engines.errors import first_line


class MemoryShortage:
    """A context that explains a lack of memory to whoever asked for so many rows of this bundle."""

    def __init__(self, bundle: Bundle, rows: int) -> None:
        self._bundle, self._rows = bundle, rows

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or not _of_memory(error):
            return
        bundle, rows = self._bundle, self._rows
        weights = sum(map(bundle.weight_bytes, bundle.models)) / 2**20
        models = bundle.models.items()
        caches = sum(one.contract.cache_bytes(rows, bundle.capacity_of(name)) for name, one in models) / 2**20
        raise EngineError(
            f"no memory is left ({first_line(error)}): weights take {weights:,.0f} MiB, caches up to "
            f"{caches:,.0f} MiB for {rows} rows of {bundle.capacity} tokens, and the "
            "engine needs a workspace; lower max_batch, or export with a shorter --max-length or smaller weights"
        ) from error


def _of_memory(error: BaseException) -> bool:
    """Whether an error says that memory has run out; on the CPU torch says so with a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "alloc" in str(error)
