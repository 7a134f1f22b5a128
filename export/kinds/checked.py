"""The course of every head's check: its written graph in ONNX Runtime beside the head in torch, both in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...engines import Contract, Engine, open_engine
from ..checking.check import Errors, in_float32
from ..checking.oracle import computing_in_float32

# Runs a graph, compares it with the head where errors are to be noted, and returns the graph's logits [L - 1, V] of the
# place behind the next one, after each token but the last.
Compare = Callable[[Engine, Errors | None], Tensor]


@torch.no_grad()
def checked(
    graph: Path, contract: Contract, head: Any, quantised: bool, expect: Callable[[], tuple[float, Compare]]
) -> tuple[dict[str, Any], Tensor]:
    """Return the errors and the graph's logits; `expect` lets the head compute, and says how large its logits are.

    A quantised graph is compared with exact weights. What it says is what it says as rounds run it.
    """
    wide_copy = contract.dtype != "float32"
    with computing_in_float32(head), in_float32(graph, contract) as (graph, contract):
        scale, compare = expect()
        errors = Errors(scale)
        for exact in (True, False) if quantised else (True,):
            engine = open_engine("onnxruntime", graph, contract, exact_weights=quantised and exact)
            try:
                said = compare(engine, errors if exact else None)
            finally:
                engine.close()
    return errors.report(graph) | {"as_float32_copy": wide_copy}, said


def scale_of(logits: Tensor) -> float:
    """Return the standard deviation of logits, without those of tokens that the head does not know."""
    return float(logits[logits > logits.min() / 2].std())
