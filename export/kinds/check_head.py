"""Compare a head's written graph in ONNX Runtime with the head in torch, both in float32."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...engines import Contract, open_engine
from ..checking.check import Errors, in_float32
from ..checking.oracle import computing_in_float32
from .heads import Head


@torch.no_grad()
def check_head(
    graph: Path, contract: Contract, head: Head, tokens: Tensor, features: Tensor, quantised: bool
) -> tuple[dict[str, Any], Tensor]:
    """Check a graph on the features [L, hidden] of some tokens [L], in every way in which a round calls it.

    Return the errors, and the graph's logits [L - 1, V] of the place after the next one, after each token but the
    last. A quantised graph is compared with exact weights. What it says is what it says as rounds run it.
    """
    wide_copy = contract.dtype != "float32"
    with computing_in_float32(head), in_float32(graph, contract) as (graph, contract):
        scale, compare = head.expected(tokens, features)
        errors = Errors(scale)
        for exact in (True, False) if quantised else (True,):
            engine = open_engine("onnxruntime", graph, contract, exact_weights=quantised and exact)
            try:
                said = compare(engine, errors if exact else None)
            finally:
                engine.close()
    return errors.report(graph) | {"as_float32_copy": wide_copy}, said
