"""Divide the channels of keys by factors of their own before they are rounded to eight bits, and multiply queries.

The keys of a head have one scale for all channels: where a few are large, the others would be rounded coarsely.
Factors are constants, so that a token's numbers never depend on other tokens.
"""

from collections.abc import Mapping

import onnx_ir as ir
from torch import Tensor

from .nodes import Nodes, constant
from .unround import before_rounding

NO_FACTORS: Mapping[str, Tensor] = {}
KEY = 1  # which input of an attention keys are


def divide_keys(model: ir.Model, factors: Mapping[str, Tensor]) -> int:
    """Divide the states of these names by their factors [heads, 1, size]; returns how many states there are."""
    graph = model.graph
    op, fired = Nodes(graph), 0
    for scatter in [node for node in graph if node.op_type == "TensorScatter"]:
        present = scatter.outputs[0]
        name = str(present.name).removeprefix("present_")
        if name not in factors:
            continue
        parts = before_rounding(scatter).producer()
        assert parts is not None, f"{name} is not divided by its scales"
        keys, divisor = parts.inputs[0], constant(graph, f"{name}.factors", factors[name], ir.DataType.FLOAT)
        assert keys is not None
        divided = op("Div", keys, divisor)
        for node, place in [use for use in keys.uses() if use.node is not divided.producer()]:
            if node is parts or node.op_type == "Abs":
                node.replace_input_with(place, divided)
        _give_back(graph, op, _widened(present), name, factors[name])
        fired += 1
    graph.extend(op.made)
    graph.sort()
    return fired


def _widened(present: ir.Value) -> ir.Value:
    """Follow the numbers of a state to the keys that they stand for, times their scales."""
    [cast] = (node for node in present.consumers() if node.op_type == "Cast")
    [product] = cast.outputs[0].consumers()
    found = product.outputs[0]
    narrower = [node for node in found.consumers() if node.op_type == "Cast"]
    return narrower[0].outputs[0] if len(narrower) == len(found.uses()) == 1 else found


def _give_back(graph: ir.Graph, op: Nodes, keys: ir.Value, name: str, factors: Tensor) -> None:
    """Multiply what attends to keys by their factors: queries, which are fewer, or else the keys themselves."""
    assert keys.dtype is not None
    whole: ir.Value | None = None
    for node, place in list(keys.uses()):
        if node.op_type == "Attention" and place == KEY:
            query = node.inputs[0]
            assert query is not None
            assert query.shape is not None
            heads = query.shape[1]
            assert isinstance(heads, int)
            shared = heads // len(factors)
            if (spread := f"{name}.factors.{shared}") not in graph.initializers:
                constant(graph, spread, factors.repeat_interleave(shared, 0), keys.dtype)
            asked = op("Mul", query, graph.initializers[spread])
            asked.shape, asked.type = query.shape, query.type
            node.replace_input_with(0, asked)
            continue
        if whole is None:
            whole = op("Mul", keys, constant(graph, f"{name}.factors.kept", factors, keys.dtype))
            whole.shape, whole.type = keys.shape, keys.type
        node.replace_input_with(place, whole)
