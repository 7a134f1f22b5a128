"""One model of the pair: its engine, and a cache that follows the live rows."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...engines import GRANULE, Engine
from .cache import KVCache


class Model:
    """Binds an engine to its cache and to one memory for logits, which every step of the model overwrites."""

    def __init__(self, engine: Engine, vocab_size: int, max_rows: int, capacity: int) -> None:
        self.engine = engine
        self.vocab_size = vocab_size  # the graph may have more, as padding
        self._max = (max_rows, capacity)
        rows, length = self._max if engine.static_capacity else (1, GRANULE)
        self.cache = KVCache(engine.contract, engine.device, rows, length)
        self._logits = torch.zeros(0, device=engine.device)
        engine.bind(self.cache.buffers)

    def has_room(self, rows: int, capacity: int) -> bool:
        return self.engine.static_capacity or self.cache.fits(rows, capacity)

    def make_room(self, rows: int, capacity: int, kept: Mapping[int, int]) -> bool:
        """Before a call that writes below `capacity` in rows < `rows`; `kept` are the live lengths.

        True if the cache has moved: steps made before write to the old one.
        """
        moved = not self.engine.static_capacity and self.cache.fit(rows, capacity, kept)
        if moved:
            self.engine.bind(self.cache.buffers)
        return moved

    def logits(self, batch: int, rows: int) -> Tensor:
        """Memory for logits [B, R, V]."""
        size = batch * rows * self.engine.contract.vocab_size
        if size > len(self._logits):
            self._logits = torch.zeros(size, device=self.engine.device)
        return self._logits[:size].view(batch, rows, -1)

    def close(self) -> None:
        self.engine.close()
        self.cache.buffers = {}
        self._logits = torch.zeros(0)

    def prefill(self, row: int, tokens: Tensor, start: int) -> None:
        """Write the cache entries of `tokens` [S] from `start` on."""
        for chunk in torch.split(tokens, self.engine.prefill_width):
            first = torch.full((1,), start, device=tokens.device)
            self.engine.step(row, chunk[None], first, self.logits(1, 1)).run()
            start += len(chunk)
