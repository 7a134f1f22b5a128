"""Keep a target's features of each token for a head, which reads with every token those of the one before it."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...engines import FEATURES
from .cache import KVCache


class Features:
    """Finds a head's features in the cache of its target, which are `own` of those that it keeps."""

    def __init__(self, cache: KVCache, own: slice) -> None:
        self._cache, self._own = cache, own

    def into(self, given: Tensor, first_row: int, start: Tensor) -> Callable[[], None]:
        """Make a function that fills `given` [B, S, size] for tokens that begin at `start` [B] of some rows.

        These are the rows from `first_row` on. It holds as long as the cache stays where it is. The first token of a
        row has nothing before it, and what is given for it is never read.
        """
        batch, width, size = given.shape
        entries = self._cache.buffers[FEATURES][first_row : first_row + batch, 0]  # [B, T, all]
        capacity, device = entries.shape[1], given.device
        assert len(entries) == batch, "a head reads rows that its target has"
        flat, found = entries.view(-1, entries.shape[2])[:, self._own], given.view(-1, size)
        rows = torch.arange(batch, device=device)[:, None] * capacity
        before = torch.arange(-1, width - 1, device=device)

        def fill() -> None:
            places = (start[:, None] + before).clamp_(0, capacity - 1).add_(rows)
            torch.index_select(flat, 0, places.view(-1), out=found)

        return fill
