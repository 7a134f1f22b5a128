"""Give attention the queries of heads that share keys as more rows of one head, and take that back.

ONNX Runtime sums a product of one row in another order than one of several. In float32 that moves a last bit. Where
activations are rounded to 8 bits it flips some of them, and in a deep model the logits of one token then differ from
those that it has beside others by as much as all the rounding. Stacked, there is no product of one row.
"""

import numpy as np
import onnx_ir as ir

from ...engines import ExportError

STACKED = ".stacked_"  # in the names of what has its rows in other heads


def stack_heads(model: ir.Model) -> int:
    """Stack the heads of each attention in which some share keys and are not stacked; returns how many there were."""
    graph = model.graph
    masks: dict[tuple[ir.Value, int], ir.Value] = {}
    fired = 0
    for node in list(graph):
        if node.op_type != "Attention":
            continue
        query, key, _, *others = node.inputs
        found = node.outputs[0]
        assert query is not None
        assert key is not None
        if STACKED in str(query.name):
            continue
        heads, kv_heads = _heads(query), _heads(key)
        if heads == kv_heads:
            continue
        [mask] = others
        assert mask is not None
        shared = heads // kv_heads
        if (mask, shared) not in masks:
            one_for_all = mask.dtype == ir.DataType.BOOL
            rows = (
                ir.node("Concat", [mask] * shared, {"axis": 2}) if one_for_all else _with_heads(graph, mask, kv_heads)
            )
            rows.outputs[0].type = mask.type
            graph.insert_before(node, [rows])
            masks[mask, shared] = rows.outputs[0]
        stacked = _with_heads(graph, query, kv_heads)
        graph.insert_before(node, [stacked])
        node.replace_input_with(0, stacked.outputs[0])
        node.replace_input_with(3, masks[mask, shared])
        users = list(found.uses())
        apart = _with_heads(graph, found, heads)
        apart.outputs[0].shape, apart.outputs[0].type, found.shape = found.shape, found.type, None
        graph.insert_after(node, [apart])
        for use in users:
            use.node.replace_input_with(use.idx, apart.outputs[0])
        fired += 1
    return fired


def unstack_heads(model: ir.Model) -> int:
    """Give each attention its heads back one by one; returns in how many they were stacked."""
    fired = 0
    for node in list(model.graph):
        if node.op_type != "Attention" or len(node.inputs) < 4:  # without a mask
            continue
        query, mask, found = node.inputs[0], node.inputs[3], node.outputs[0]
        stacked, rows = (value.producer() if value is not None else None for value in (query, mask))
        [(apart, _), *others] = found.uses()
        if stacked is None or rows is None:
            continue
        if (rows.op_type, len(set(rows.inputs))) != ("Concat", 1) and STACKED not in str(rows.outputs[0].name):
            continue
        assert (stacked.op_type, apart.op_type, others) == ("Reshape", "Reshape", [])
        whole = apart.outputs[0]
        node.replace_input_with(0, stacked.inputs[0])
        node.replace_input_with(3, rows.inputs[0])
        found.shape, found.type = whole.shape, whole.type
        whole.replace_all_uses_with(found)
        model.graph.remove([apart, stacked], safe=True)
        if not rows.outputs[0].uses():
            model.graph.remove(rows, safe=True)
        fired += 1
    return fired


def _heads(value: ir.Value) -> int:
    heads = None if value.shape is None else value.shape[1]
    if not isinstance(heads, int):
        raise ExportError(f"{value.name} has the shape {value.shape}, expected a number of heads; please report it")
    return heads


def _with_heads(graph: ir.Graph, value: ir.Value, heads: int) -> ir.Node:
    """Split the rows `[B, heads, rows, D]` otherwise over heads."""
    last = 0 if value.shape is None else value.shape[3]
    last = last if isinstance(last, int) else 0  # as it was
    sizes = ir.Tensor(np.array([0, heads, -1, last]), name=f"{value.name}.of_{heads}_heads")
    constant = ir.Value(name=sizes.name, shape=sizes.shape, type=ir.TensorType(sizes.dtype), const_value=sizes)
    graph.register_initializer(constant)
    node = ir.node("Reshape", [value, constant])
    node.outputs[0].name, node.outputs[0].type = f"{value.name}{STACKED}{heads}", value.type
    return node
