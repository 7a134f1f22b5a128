"""Compute a half-precision graph in float32 on the very same weights, for engines without such kernels."""

import onnx_ir as ir

NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
WIDE = ir.DataType.FLOAT


def widen(model: ir.Model) -> int:
    """Compute everything in float32; a stored weight is cast where it is used. Returns the number of such weights.

    What integers and scales make is rounded as the narrow type rounds it, since it is a weight.

    The weights become inputs with default values: an engine that took them for constants would fold the casts at
    load and hold every weight once more, in float32.
    """
    graph = model.graph
    for node in list(graph):
        if node.op_type == "Cast" and node.attributes.get_int("to") in NARROW:
            node.attributes["to"] = ir.AttrInt64("to", int(WIDE))
        if node.op_type == "DequantizeLinear" and node.outputs[0].dtype in NARROW:
            _round(graph, node)
        for output in node.outputs:
            _widen_type(output)
    for value in (*graph.inputs, *graph.outputs):
        _widen_type(value)
    weights = [value for value in graph.initializers.values() if value.dtype in NARROW]
    for weight in weights:
        _cast_uses(graph, weight)
        graph.inputs.append(weight)
    return len(weights)


def _widen_type(value: ir.Value) -> None:
    if value.dtype in NARROW:
        value.dtype = WIDE


def _round(graph: ir.Graph, node: ir.Node) -> None:
    """Round what a node gives to its narrow type, and go on with that in float32."""
    [made] = node.outputs
    assert made.dtype is not None
    users = list(made.uses())
    rounded = ir.node("Cast", [made], {"to": int(made.dtype)})
    narrow = rounded.outputs[0]
    narrow.name, narrow.shape, narrow.type = f"{made.name}.rounded", made.shape, ir.TensorType(made.dtype)
    back = _cast(narrow)
    graph.insert_after(node, [rounded, back])
    for use in users:
        use.node.replace_input_with(use.idx, back.outputs[0])


def _cast_uses(graph: ir.Graph, weight: ir.Value) -> None:
    others = []
    for use in list(weight.uses()):
        if use.node.op_type == "Gather" and use.idx == 0:  # cast the rows found, not the table
            _cast_rows(graph, use.node, weight)
        else:
            others.append(use)
    if others:
        cast = _cast(weight)
        graph.insert_before(graph[0], [cast])
        for use in others:
            use.node.replace_input_with(use.idx, cast.outputs[0])


def _cast_rows(graph: ir.Graph, lookup: ir.Node, table: ir.Value) -> None:
    rows = lookup.outputs[0]
    users = list(rows.uses())
    rows.type = table.type
    cast = _cast(rows)
    graph.insert_after(lookup, [cast])
    for use in users:
        use.node.replace_input_with(use.idx, cast.outputs[0])


def _cast(narrow: ir.Value) -> ir.Node:
    cast = ir.node("Cast", [narrow], {"to": int(WIDE)})
    output = cast.outputs[0]
    output.name, output.shape, output.type = f"{narrow.name}.float32", narrow.shape, ir.TensorType(WIDE)
    return cast
