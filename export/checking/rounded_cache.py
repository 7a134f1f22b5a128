"""Let transformers' own cache round what it keeps, as graphs with caches of eight bits do."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...engines import TOKEN, Contract, State, scale_of
from ..passes.divide_keys import NO_FACTORS
from ..tracing.eight_bits import narrowed, widened

DISTURBED = 5e-5  # of an entry: many times what two libraries differ by
SEED = 0
Rounding = Callable[[Tensor], tuple[Tensor, Tensor]]  # numbers of eight bits and their scales


def narrow_states(contract: Contract) -> dict[str, Rounding]:
    """Return how each state of eight bits is made, by its name."""
    by_name = {state.name: state for state in contract.of_kind(TOKEN)}
    scales = {name: by_name.get(scale_of(name)) for name in by_name}
    return {name: _rounding(by_name[name], scale) for name, scale in scales.items() if scale is not None}


def _rounding(state: State, scale: State) -> Rounding:
    dtype, scale_dtype = (getattr(torch, one.dtype) for one in (state, scale))
    return partial(narrowed, dtype=dtype, scale_dtype=scale_dtype)


@contextmanager
def entries_rounded(
    model: Any, contract: Contract, factors: Mapping[str, Tensor] = NO_FACTORS, *, disturbed: bool = False
) -> Iterator[None]:
    """Have a model read keys and values as the contract's cache keeps them, until the block ends.

    Keys are divided by their factors, if they have some, before they are rounded. It makes a cache in every call, also
    where it would need none. Entries that are `disturbed` before they are rounded
    show what becomes of those that lie between two numbers of eight bits.
    """
    made = narrow_states(contract)
    if not made:
        yield
        return
    rounding = next(iter(made.values()))  # all are alike

    random = torch.Generator().manual_seed(SEED)

    def kept(entries: Tensor, name: str = "") -> Tensor:
        if disturbed:
            entries = entries * (1 + DISTURBED * torch.randn(entries.shape, generator=random).to(entries.dtype))
        if name not in factors:
            return widened(*rounding(entries), dtype=entries.dtype)
        one = factors[name]
        if len(one) != entries.shape[1]:  # transformers may keep keys once for each head that shares them
            one = one.repeat_interleave(entries.shape[1] // len(one), 0)
        return widened(*rounding(entries / one), dtype=entries.dtype) * one

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        from transformers import DynamicCache

        cache = kwargs.get("cache") or DynamicCache(config=model.config)
        update = type(cache).update
        cache.update = lambda key, value, layer, *more, **others: update(
            cache, kept(key, f"key_{layer}"), kept(value), layer, *more, **others
        )
        return args, kwargs | {"cache": cache, "use_cache": True}

    hook = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
