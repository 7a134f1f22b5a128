"""Look rows up in a widened table, not in one of integers, which TensorRT takes only into DequantizeLinear."""

import onnx_ir as ir


def widen_lookups(model: ir.Model) -> int:
    """Put the widening of looked-up integers before the lookup; returns how many were moved."""
    graph = model.graph
    fired = 0
    for node in list(graph):
        if node.op_type != "DequantizeLinear":
            continue
        rows, scales = (value.producer() if value is not None else None for value in node.inputs[:2])
        if rows is None or scales is None or rows.op_type != "Gather" or scales.op_type != "Gather":
            continue
        table, ids = rows.inputs
        assert table is not None
        widen = ir.node("DequantizeLinear", [table, scales.inputs[0]], dict(node.attributes) | {"axis": 1})
        wide, found = widen.outputs[0], node.outputs[0]
        wide.name, wide.shape, wide.type = f"{table.name}.wide", table.shape, found.type
        lookup = ir.node("Gather", [wide, ids], {"axis": 0})
        looked_up = lookup.outputs[0]
        looked_up.name, looked_up.shape, looked_up.type = f"{found.name}.looked_up", found.shape, found.type
        graph.insert_before(node, [widen, lookup])
        found.replace_all_uses_with(looked_up)
        for old in (node, rows, scales):
            graph.remove(old, safe=True)
        fired += 1
    return fired
