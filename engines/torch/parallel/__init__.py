"""A graph in shards: one process a device runs each, and sums go between them."""

from collections.abc import Sequence
from pathlib import Path

from ...contract import Contract
from ...engine import Engine


def open_sharded(name: str, graph: Path, contract: Contract, devices: Sequence[str]) -> Engine:
    """Open the first shard here, and the others in processes of their own."""
    from .engine import ShardedEngine

    return ShardedEngine(graph, contract, devices, compiled=name == "torch-compiled")
