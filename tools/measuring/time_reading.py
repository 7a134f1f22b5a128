"""Time how long a draft model takes to read tokens before it can propose: so long a call, and so long each token."""

from statistics import median

import torch

from ...engines import PREFILL_WIDTH
from ...runtime import Decoder
from ...runtime.memory.model import Model
from ..timing.clock import run_ms

FEW = 16  # tokens
REPEATS = 7


def reading_ms(decoder: Decoder, model: Model) -> tuple[float, float]:
    """Return the milliseconds of a call that reads tokens of one row, and of each of its tokens."""
    if not model.engine.contract.kept:
        return 0.0, 0.0  # heads that keep nothing
    many = min(PREFILL_WIDTH, decoder.bundle.capacity)
    few = min(FEW, many // 2)
    with decoder.between_rounds():
        taken = {tokens: _median_ms(model, tokens) for tokens in (few, many)}
        model.cache.free(0)
    each = max(0.0, taken[many] - taken[few]) / (many - few)
    return max(0.0, taken[few] - few * each), each


def _median_ms(model: Model, tokens: int) -> float:
    device = model.engine.device
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)

    def read() -> None:
        model.cache.free(0)
        model.prefill([0], [ids])

    return median([run_ms(read, device) for _ in range(1 + REPEATS)][1:])  # the first warms up
