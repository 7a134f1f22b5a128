"""Measure how unlike the channels of a model's keys are, and by what each is divided before it is rounded to int8."""

from typing import Any

import torch
from torch import Tensor

from ...engines import TOKEN, Contract
from .oracle import cached_rows

MEASURED = 512  # tokens, the last of the text: what a cache costs is measured on the first ones
LEAST = 2.0**-6  # factor, also of a channel that is never used


def key_factors(model: Any, contract: Contract, tokens: list[int]) -> dict[str, Tensor]:
    """Return for each state of keys in int8 the factors [heads, 1, size] of its channels; none for others.

    A factor is the square root of how large a channel's largest key of the text is, beside the head's. In half
    precision it is a power of two, so that queries, which are multiplied by it, are not rounded once more.
    """
    if contract.rounded_to != "int8":  # numbers of fp8 are as fine where they are small
        return {}
    states = [one for one in contract.of_kind(TOKEN) if one.dtype == "int8" and one.name.startswith("key_")]
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, read: read[0][:, -1:])  # logits are many
    try:
        keys = cached_rows(model, tokens[-min(MEASURED, contract.max_length) :])[::2]
    finally:
        hook.remove()
    factors = {}
    for state, made in zip(states, keys, strict=True):
        every = made.shape[1] // state.shape[0]  # transformers may keep them once for each head that shares
        largest = made[0, ::every].abs().amax(1, keepdim=True)  # [heads, 1, size]
        share = largest / largest.amax(-1, keepdim=True).clamp(min=torch.finfo(largest.dtype).tiny)
        exact = share.sqrt().clamp(min=LEAST)
        factors[state.name] = exact if contract.dtype == "float32" else exact.log2().round().exp2()
    return {name: each for name, each in factors.items() if bool((each < 1).any())}
