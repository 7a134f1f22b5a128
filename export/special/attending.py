"""Put another attention in the place of a family's own code while it is traced, until a block ends."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ..tracing.cache import Places
from ..tracing.modules import IMPLEMENTATION, attention, positions_of_entries
from ..tracing.swapping import swapped


@contextmanager
def with_attention(model: Any, owner: Any, **methods: Any) -> Iterator[None]:
    """Let a class attend by other methods, and the model ask us for its masks, which transformers allows few to."""
    with swapped(model.config, _attn_implementation_internal=IMPLEMENTATION), swapped(owner, **methods):
        yield


def asked(
    module: Any,
    query: Tensor,  # [B, heads, S, D]
    key: Tensor,  # [B, kv_heads, T, D]
    value: Tensor,  # [B, kv_heads, T, D]
    mask: Tensor,  # [B, 1, S, T]
    **settings: Any,
) -> Tensor:
    """Attend by the node that is traced; returns what was found, its heads side by side `[B, S, heads * D]`."""
    return attention(module, query, key, value, mask, **settings)[0].flatten(2)


def positions_of(places: Places, key: Tensor) -> Tensor:
    """Return the position of each entry of a cache [B, T]."""
    return positions_of_entries(places, key.shape[2])


def alibi(slopes: Tensor, places: Places, key: Tensor) -> Tensor:  # [heads]; [B, kv_heads, T, D]
    """Return what is added to scores, `[B, heads, S, T]`: the farther an entry is before a token, the less it counts.

    Transformers adds the same number more to all scores of a token. In half precision those would be rough.
    """
    own = places.start[:, None] + places.depths
    distance = own[:, :, None] - positions_of(places, key)[:, None]  # [B, S, T]
    return (-slopes[:, None, None] * distance[:, None].float()).to(key.dtype)
