"""The engine openvino is opened and called, step by step."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trt_spec.engines import (
    BLOCK_TOKENS,
    Bundle,
    Engine,
    blank_cache,
    blank_step,
    cache_rows,
    make_step,
    open_engine,
)
from trt_spec.engines.openvino import NARROW

TOKENS = 75  # in the cache before a step: more than two blocks


def opened(bundle: Path, **options: Any) -> Engine:
    found = Bundle.open(bundle)
    return open_engine("openvino", found.graph("target"), found.target.contract, **options)


class Cache:
    """Rows that all hold the same tokens, in blocks that no neighbours share."""

    def __init__(self, engine: Engine, rows: int) -> None:
        self.engine, self.rows = engine, rows
        self.tokens = torch.randint(engine.contract.vocab_size, (TOKENS + NARROW,), generator=torch.manual_seed(0))
        self.memory = blank_cache(engine.contract, rows, TOKENS + 2 * BLOCK_TOKENS)
        for row in range(rows):
            prefill = blank_step(engine, self.memory, row, 1, TOKENS, 1)
            prefill.input_ids[0] = self.tokens[:TOKENS]
            prefill.run()

    def logits(self, widths: list[int], start: int = TOKENS) -> list[Tensor]:
        """Of the tokens from `start` on, so many of each row, in one step."""
        width = max(widths)
        inputs = {
            "input_ids": self.tokens[start : start + width].repeat(len(widths), 1),
            "start": torch.full((len(widths),), start),
            "widths": torch.tensor(widths),
        }
        logits = torch.full((len(widths), width, self.engine.contract.vocab_size), torch.nan)
        rows = cache_rows(self.engine.contract, self.memory, 0, len(widths))
        make_step(self.engine, rows, inputs, {"logits": logits}).run()
        return [row[:own] for row, own in zip(logits, widths, strict=True)]
