"""The protocol every engine keeps: bind the cache once, make a step for a shape, run it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .contract import Contract


@dataclass(frozen=True)
class Step:
    """One shape of the graph with its fixed tensors: fill the inputs, `run()`, read the logits."""

    input_ids: Tensor  # [B, S] int64
    start: Tensor  # [B] int64, the cache row of each first token
    logit_rows: Tensor  # [B, R] int64, preset to the last R rows of S
    logits: Tensor  # [B, R, V] float32
    run: Callable[[], None]


class Engine(Protocol):
    """A graph opened on a device. The caller owns the cache; the engine writes it in place."""

    contract: Contract
    device: str
    static_capacity: bool  # the cache must have its full capacity from the start

    def bind(self, cache: Mapping[str, Tensor]) -> None:
        """Use these cache buffers, by contract name, `[rows, kv_heads, T, head_dim]`, from now on."""

    def step(self, first_row: int, batch: int, width: int, rows: int) -> Step:
        """The step over cache rows first_row … first_row + batch - 1; the same object for the same shape."""

    def close(self) -> None: ...
