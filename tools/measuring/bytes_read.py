"""The bytes that steps and rounds have to read: weights, and what is in the caches of their rows."""

from statistics import mean

from ...engines import Bundle
from ...engines.bundle import TARGET
from ...engines.contract.states import DTYPE_BYTES
from ...runtime.drafters import DRAFTERS
from ..timing.time_rounds import Measured


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


def round_bytes_read(bundle: Bundle, measured: Measured) -> float:
    """Return the bytes that a round of a setting has to read: each step its model's weights and live cache."""
    steps = {TARGET: 1}
    for drafter, count in measured.bare.draft_steps.items():
        name = DRAFTERS[drafter].model_name(bundle)
        assert name is not None, "it runs a model"
        steps[name] = steps.get(name, 0) + count
    entries = round(mean(one.entries for one in measured.lasting))
    return sum(
        count * (weight_bytes_read(bundle, name) + cache_bytes_read(bundle, name, entries))
        for name, count in steps.items()
    )
