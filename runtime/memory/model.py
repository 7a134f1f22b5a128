"""One model of a bundle: its engine, and a cache that follows the live rows."""

import torch
from torch import Tensor

from ...engines import GRANULE, Engine, Step, last_rows, make_step
from .cache import KVCache


class Model:
    """Binds an engine to its cache and to one memory for logits, which every step of the model overwrites."""

    def __init__(self, engine: Engine, vocab_size: int, max_rows: int, capacity: int) -> None:
        self.engine = engine
        self.vocab_size = vocab_size  # the graph may have more, as padding
        rows, length = (max_rows, capacity) if engine.static_capacity else (1, GRANULE)
        self.cache = KVCache(engine.contract, engine.device, max_rows, rows, length)
        self._logits = torch.zeros(0, device=engine.device)
        self._last_rows: dict[tuple[int, int, int], Tensor] = {}  # never written to
        engine.reserve(max_rows, capacity)

    def make_room(self, rows: int, capacity: int) -> None:
        """Make room to write below `capacity` in rows < `rows`. If the cache moves, older steps are void."""
        if not self.engine.static_capacity:
            self.cache.fit(rows, capacity)

    def logits(self, batch: int, rows: int) -> Tensor:
        """Return memory for logits [B, R, V]."""
        size = batch * rows * self.engine.contract.vocab_size
        if size > len(self._logits):
            self._logits = torch.zeros(size, device=self.engine.device)
        return self._logits[:size].view(batch, rows, -1)

    def step(self, first_row: int, input_ids: Tensor, start: Tensor, logits: Tensor) -> Step:
        """Make a step over these tensors for the rows from `first_row` on."""
        (batch, width), rows = input_ids.shape, logits.shape[1]
        shape = batch, width, rows
        if shape not in self._last_rows:
            self._last_rows[shape] = last_rows(*shape, self.engine.device)
        inputs = {"input_ids": input_ids, "start": start, "logit_rows": self._last_rows[shape]}
        return make_step(self.engine, self.cache.tensors(first_row, len(input_ids)), inputs, {"logits": logits})

    def prefill(self, row: int, tokens: Tensor, start: int) -> None:
        """Write the cache entries of `tokens` [S] from `start` on."""
        self.make_room(row + 1, start + len(tokens))
        for width in self.engine.prefill_widths(len(tokens)):
            chunk, tokens = tokens[:width], tokens[width:]
            first = torch.full((1,), start, device=chunk.device)
            self.step(row, chunk[None], first, self.logits(1, 1)).run()
            start += width
        self.cache.entries[row] = start

    def close(self) -> None:
        self.engine.close()
        self.cache.buffers = {}
        self._logits = torch.zeros(0)
