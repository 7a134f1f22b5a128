"""Compare the shards of a graph, each in a process of its own, with the graph that they were made of."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ...engines import Contract, ExportError, open_engine, open_engines
from .quality import engine_logits

ENGINE = "torch"
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 1e-1}  # of the scale: sums are made in another order


def whole_logits(graph: Path, contract: Contract, tokens: Sequence[int]) -> Tensor:
    """Return the logits [L, V] of the text, by the graph as it is before it is split."""
    engine = open_engine(ENGINE, graph, contract)
    try:
        return engine_logits(engine, list(tokens))
    finally:
        engine.close()


def check_shards(graph: Path, contract: Contract, tokens: Sequence[int], wanted: Tensor) -> float:
    """Return by how much the worst logit of the shards differs, in standard deviations of all."""
    [engine] = open_engines(ENGINE, [(graph, contract)], devices=["cpu"] * contract.shards)
    try:
        found = engine_logits(engine, list(tokens))
    finally:
        engine.close()
    off = float((found - wanted).abs().max() / wanted.std())
    if not off <= TOLERANCE[contract.dtype]:
        raise ExportError(
            f"the {contract.shards} shards of the {graph.parent.name} do not compute what the whole graph does: a "
            f"logit is off by {off:.2g} standard deviations; export it whole, and please report it"
        )
    return off
