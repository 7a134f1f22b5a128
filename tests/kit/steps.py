"""Single steps on tensors of their own."""

from collections.abc import Sequence

import torch
from torch import Tensor
from trt_spec.engines import Engine, blank_step
from trt_spec.runtime.memory.model import Model


def feed(model: Model, row: int, tokens: Sequence[int], start: int) -> Tensor:
    """One call for `tokens` from `start` on; the logits [V] after the last."""
    step = blank_step(model.engine, model.cache.everything, row, 1, len(tokens), 1)
    step.input_ids[0] = torch.tensor(tokens)
    step.start[0] = start
    step.run()
    return step.logits[0, -1].clone()


def model_of(engine: Engine, rows: int, capacity: int = 64) -> Model:
    """With a cache full of sevens, which what is written replaces."""
    model = Model(engine, engine.contract.vocab_size, rows, capacity)
    model.cache.make_room(0, [0] * rows, [capacity] * rows)
    for buffer in model.cache.buffers.values():
        buffer.fill_(7.0)
    return model
