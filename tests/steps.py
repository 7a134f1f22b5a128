"""Single steps of an engine on tensors of their own."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from trt_spec.engines import Engine, blank_step
from trt_spec.runtime.memory.cache import KVCache


def feed(engine: Any, row: int, tokens: Sequence[int], start: int) -> Tensor:
    """One call for `tokens` from `start` on; the logits [V] after the last."""
    step = blank_step(engine, row, 1, len(tokens), 1)
    step.input_ids[0] = torch.tensor(tokens)
    step.start[0] = start
    step.run()
    return step.logits[0, -1].clone()


def cache_of(engine: Engine, rows: int, capacity: int = 64) -> KVCache:
    """Bound, and full of sevens, which what is written replaces."""
    cache = KVCache(engine.contract, "cpu", rows, capacity)
    for buffer in cache.buffers.values():
        buffer.fill_(7.0)
    engine.bind(cache.buffers)
    return cache
