"""Give a graph the sizes of one role: TensorRT wants the cache's capacity fixed, and plans best for a fixed width."""

from collections.abc import Mapping

import onnx_ir as ir

from .simplify import simplify


def specialise(model: ir.Model, sizes: Mapping[str, int]) -> int:
    """Replace symbols of the contract by numbers and fold what follows from them; returns how many nodes went."""
    graph = model.graph
    for value in (*graph.inputs, *(output for node in graph for output in node.outputs)):
        if value.shape is not None:
            value.shape = ir.Shape([sizes.get(str(dim), dim) for dim in value.shape])
    return simplify(model)
