"""One model of the pair: its engine, its cache, and the three things a round asks of them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ..engines import Engine, Step
from .cache import GRANULE, KVCache

PREFILL_WIDTH = 256


class Model:
    """Binds an engine to a cache that follows the live rows."""

    def __init__(self, engine: Engine, vocab_size: int, max_rows: int, capacity: int) -> None:
        self.engine = engine
        self.vocab_size = vocab_size
        self._max = (max_rows, capacity)
        rows, length = self._max if engine.static_capacity else (1, GRANULE)
        self.cache = KVCache(engine.contract, engine.device, rows, length)
        engine.bind(self.cache.buffers)

    def make_room(self, rows: int, capacity: int, kept: Mapping[int, int]) -> None:
        """Before a call that writes below `capacity` in rows < `rows`; `kept` are the live lengths."""
        if not self.engine.static_capacity and self.cache.fit(rows, capacity, kept):
            self.engine.bind(self.cache.buffers)

    def prefill(self, row: int, tokens: Tensor, start: int) -> None:
        """Write the cache entries of `tokens` [S] from `start` on."""
        step = self.engine.step(row, 1, tokens.shape[0], 1)
        step.input_ids[0] = tokens
        step.start[0] = start
        step.run()

    def begin(self, window: Tensor, length: Tensor) -> Step:
        """The draft's first step: it sees the last two tokens, so that no cache entry is ever missing."""
        step = self.engine.step(0, window.shape[0], 2, 1)
        step.input_ids.copy_(window)
        torch.sub(length, 2, out=step.start).clamp_(min=0)
        step.run()
        return step

    def extend(self, token: Tensor, length: Tensor, ahead: int) -> Step:
        """A later draft step: `token` [A] was proposed `ahead` tokens past the committed ones."""
        step = self.engine.step(0, token.shape[0], 1, 1)
        step.input_ids[:, 0] = token
        torch.add(length, ahead, out=step.start)
        step.run()
        return step

    def score(self, last: Tensor, proposal: Tensor, length: Tensor) -> Tensor:
        """The target's logits [A, K+1, V] after the last committed token and each proposal."""
        width = proposal.shape[1] + 1
        step = self.engine.step(0, last.shape[0], width, width)
        torch.cat([last[:, None], proposal], 1, out=step.input_ids)
        torch.sub(length, 1, out=step.start)
        step.run()
        return self.logits(step)

    def logits(self, step: Step) -> Tensor:
        """Those of real tokens [A, R, V]; what lies beyond is padding."""
        return step.logits[..., : self.vocab_size]
