"""Entries of eight bits that are multiplied by their scales where they were widened, in no memory of their own."""

from ...contract import EIGHT_BITS, TOKEN, Contract
from .rewriting import Rewriting, fused


def fuse(graph: Rewriting) -> int:
    """Return how many states are widened so."""
    contract = graph.contract
    if not isinstance(contract, Contract):
        return 0
    states = [state for state in contract.of_kind(TOKEN) if state.dtype in EIGHT_BITS]
    fired = 0
    for numbers in [f"present_{state.name}" for state in states]:
        readers = graph.readers(numbers)
        if [node.op for node in readers] != ["Cast"]:
            continue
        [cast] = readers
        if (product := graph.only_reader(cast.outputs[0], "Mul")) is None:
            continue
        [scales] = (each for each in product.inputs if each != cast.outputs[0])
        graph.replace([cast, product], fused("Widened", [numbers, scales], product.outputs, **cast.attributes))
        fired += 1
    return fired
