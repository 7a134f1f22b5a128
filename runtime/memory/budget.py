"""One budget of bytes for the caches of all models: what requests may need of them decides who may join."""

from collections.abc import Sequence

from ...engines import MOST_SLOTS, ROW, SLOTS, WINDOW, Contract, RequestError
from .model import Model
from .snapshots import EVERY

SPREAD = 2  # tokens that a draft with its own may have for each of the target's,
BESIDE = 64  # and beside them, of what it has proposed


def tokens_in(
    contracts: Sequence[Contract],
    size: int | None,
    name: str,
    rows: int = 0,
    *,
    kept: bool = False,
    sources: Sequence[int] = (),
) -> int | None:
    """Return how many tokens fit into so many bytes of all caches, each the same number; None: as many as there may be.

    What so many rows take beside their tokens is set aside, and what they take of `sources`, the longest of each model.
    Tokens that are `kept` have copies of states among them.
    """
    if size is None:
        return None
    if type(size) is not int or size < 1:
        raise RequestError(f"{name} is {size!r}, expected a positive whole number")
    aside = rows * sum(map(beside_tokens, contracts))
    for contract, longest in zip(contracts, sources, strict=bool(sources)):
        aside += rows * longest * contract.source_bytes
    each = sum(contract.cache_bytes_per_token for contract in contracts)
    if kept:
        each += sum(-(-state.bytes // EVERY) for contract in contracts for state in contract.of_kind(ROW))
    if not each:
        return None if aside <= size else 0
    return max(0, size - aside) // each


def beside_tokens(contract: Contract) -> int:
    """Return the bytes of each row that are no tokens'.

    Wide rounds take more slots of the tokens' room; where tokens take none, room is left for all slots.
    """
    more = 0 if contract.cache_bytes_per_token else MOST_SLOTS - SLOTS
    return contract.cache_bytes_per_row + more * sum(state.bytes for state in contract.of_kind(WINDOW))


class Budget:
    """Knows which requests fit into the caches together."""

    def __init__(self, models: Sequence[Model]) -> None:
        self._models = models

    def admits(self, lengths: Sequence[int], widest: int) -> bool:
        """Whether requests that write up to so many entries each fit together, in rounds of up to the `widest`."""
        own = [SPREAD * length + BESIDE for length in lengths]
        return all(model.cache.holds(own if model.own_tokens else lengths, widest) for model in self._models)
