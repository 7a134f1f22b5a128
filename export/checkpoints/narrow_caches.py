"""The caches that a graph can keep keys and values in, and which models cannot keep theirs in eight bits."""

from dataclasses import replace

from ...engines import FP8, RECURRENT, SOURCE, TOKEN, Contract, ExportError, in_eight_bits

FULL = "full"
CACHES = {FULL: "", "int8": "int8", "fp8": FP8}  # the dtype of keys and values, if they have scales


def with_cache(name: str, contract: Contract, cache: str) -> Contract:
    """Return the contract of a graph that keeps keys and values so, or refuse a model that cannot."""
    if not CACHES[cache]:
        return contract
    if contract.of_kind(SOURCE):
        raise ExportError(f"checkpoint {name} has an encoder, expected a decoder alone for --cache {cache}")
    if RECURRENT in contract.capabilities:
        raise ExportError(f"checkpoint {name} has recurrent layers, which --cache {cache} does not know")
    pairs = contract.of_kind(TOKEN)
    if any(key.shape != value.shape for key, value in zip(pairs[::2], pairs[1::2], strict=True)):
        raise ExportError(f"checkpoint {name} has latent attention, which --cache {cache} does not know")
    return replace(contract, states=tuple(in_eight_bits(contract.states, CACHES[cache])))
