"""The protocol every engine keeps: bind the cache once, make a step over fixed tensors, run it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .contract import Contract


@dataclass(frozen=True)
class Step:
    """A call of the graph on the caller's own tensors: fill the inputs, `run()`, read the logits."""

    input_ids: Tensor  # [B, S] int64
    start: Tensor  # [B] int64, the cache row of each first token
    logits: Tensor  # [B, R, V] float32, of the last R tokens of S
    run: Callable[[], None]


class Engine(Protocol):
    """A graph opened on a device. The caller owns all tensors; the engine writes the cache in place."""

    contract: Contract
    device: str
    static_capacity: bool  # the cache must have its full capacity from the start
    verify_width: int  # the most tokens of a step whose logits it gives
    prefill_width: int  # the most tokens of a step

    def bind(self, cache: Mapping[str, Tensor]) -> None:
        """Use these cache buffers, by contract name, `[rows, kv_heads, T, head_dim]`, in all steps made from now on."""

    def step(self, first_row: int, input_ids: Tensor, start: Tensor, logits: Tensor) -> Step:
        """A step over cache rows first_row … first_row + B - 1 that reads and writes these contiguous tensors."""

    def capturable(self) -> bool:
        """Whether the steps that ran may be recorded in a CUDA graph of torch's current stream."""

    def close(self) -> None: ...


def blank_step(engine: Engine, first_row: int, batch: int, width: int, rows: int) -> Step:
    """A step on new tensors of its own, all zero."""
    return engine.step(
        first_row,
        torch.zeros(batch, width, dtype=torch.int64, device=engine.device),
        torch.zeros(batch, dtype=torch.int64, device=engine.device),
        torch.zeros(batch, rows, engine.contract.vocab_size, device=engine.device),
    )
