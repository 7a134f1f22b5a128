"""The bytes that a step of a model has to read: its weights, and what is in the caches of its rows."""

from ...engines import Bundle
from ...engines.contract.states import DTYPE_BYTES


def weight_bytes_read(bundle: Bundle, name: str) -> int:
    """Return the bytes of the weights that each step reads.

    A tied embedding may be stored twice and is read once. In quantised weights the embedding is a small part.
    """
    model = bundle.models[name]
    if model.weights != "none":
        return bundle.weight_bytes(name)
    return DTYPE_BYTES[model.contract.dtype] * model.parameters


def cache_bytes_read(bundle: Bundle, name: str, tokens: int) -> int:
    """Return the bytes that models keep of so many tokens of all rows together."""
    return bundle.models[name].contract.cache_bytes_per_token * tokens
