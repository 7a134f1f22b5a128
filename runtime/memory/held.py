"""What takes the memory of a process: how much each pool holds, and an error that says so where memory runs out."""

from collections.abc import Sequence
from types import TracebackType

import torch

from ...engines import Bundle, EngineError
from ...engines.errors import first_line
from .model import Model


def held_bytes(bundle: Bundle, models: Sequence[Model], of_sources: int, adapters: int) -> dict[str, int]:
    """Return the bytes of weights, of the caches of all rows, of what is kept for others, and of logits.

    Steps of rounds run one after another, so all take the memory of the largest, which is reported as if it ran now.
    """
    return {
        "weights": sum(map(bundle.weight_bytes, bundle.folders)),
        "caches": sum(model.cache.held_bytes for model in models),
        "prefixes": sum(model.cache.kept_bytes for model in models) + of_sources,
        "adapters": adapters,
        "logits": sum(model.logits_bytes for model in models),
        "steps": max(model.step_bytes for model in models),
    }


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
