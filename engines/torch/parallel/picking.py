"""Lets shards give the best tokens of their parts of the vocabulary, where nobody reads other logits."""

from collections.abc import Sequence
from functools import partial

from ..engine import TorchEngine
from ..onnx_graph import Node

GATHER = "trt_spec::AllGather"


def picking(engine: TorchEngine, rank: int, vocab_size: int) -> TorchEngine:
    """Return a shard's engine that gathers of the logits no more than the best of the first so many tokens need."""
    return engine.over(partial(_with_best, rank=rank, vocab_size=vocab_size, size=engine.contract.vocab_size))


def _with_best(nodes: Sequence[Node], rank: int, vocab_size: int, size: int) -> list[Node]:
    gather = next((node for node in nodes if node.op == GATHER), None)
    if gather is None:  # every shard has all logits
        return [*nodes]
    shards, [gathered] = gather.attributes["shards"], gather.outputs
    if -(-size // shards) * (shards - 1) >= vocab_size:  # the last shard has padding alone
        return [*nodes]
    kept = [node for node in nodes if node is not gather and gathered not in node.inputs]
    given = {"shards": shards, "rank": rank, "vocab_size": vocab_size, "size": size}
    return [*kept, Node("best", "trt_spec::BestOfShards", gather.inputs, ("logits",), given)]
