"""Makes the kind of cache that an engine reads."""

from functools import partial

from ...engines import Engine, RequestError
from .block_cache import BlockCache
from .cache import KVCache
from .row_cache import RowCache


def make_cache(
    engine: Engine, max_rows: int, capacity: int, most_tokens: int | None, kept_blocks: int, longest_source: int = 0
) -> KVCache:
    """Make a cache for so many rows of an engine's model."""
    contract, device = engine.contract, engine.device
    if contract.in_blocks:
        return BlockCache(contract, device, max_rows, capacity, most_tokens, kept_blocks)
    make = partial(
        RowCache,
        contract,
        device,
        max_rows,
        kept_blocks=kept_blocks,
        longest_source=longest_source,
        placing=engine,
    )
    if not engine.static_capacity:
        return make(most_tokens=most_tokens)
    if most_tokens is not None and max_rows * capacity > most_tokens:
        raise RequestError(
            f"cache_bytes has room for {most_tokens:,} tokens, this engine takes {max_rows} rows of {capacity:,}; "
            "lower max_batch, or raise cache_bytes"
        )
    return make(max_rows, capacity, fixed=True)
