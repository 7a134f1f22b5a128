"""How many bytes each pool of memory holds, so that one sees what takes a process's memory."""

from collections.abc import Sequence

from ...engines import Bundle
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
