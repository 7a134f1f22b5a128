"""Merge attentions of one query over one cache into one with more heads: TensorRT for RTX 1.7 crashes on two."""

from collections import defaultdict

import onnx_ir as ir


def merge_attentions(model: ir.Model) -> int:
    """Merge those that differ in their values only; returns how many are now part of another."""
    graph = model.graph
    same: defaultdict[tuple[object, ...], list[ir.Node]] = defaultdict(list)
    for node in graph:
        if node.op_type == "Attention":
            query, key, _, *mask = node.inputs
            same[query, key, *mask, str(dict(node.attributes))].append(node)
    fired = 0
    for nodes in same.values():
        if len(nodes) == 1:
            continue
        query, key, _, *mask = nodes[0].inputs
        heads = [
            ir.node("Concat", parts, {"axis": 1})
            for parts in ([query] * len(nodes), [key] * len(nodes), [node.inputs[2] for node in nodes])
        ]
        merged = ir.node("Attention", [*(node.outputs[0] for node in heads), *mask], dict(nodes[0].attributes))
        split = ir.node(
            "Split", merged.outputs, {"axis": 1, "num_outputs": len(nodes)}, num_outputs=len(nodes), version=24
        )
        graph.insert_after(nodes[-1], [*heads, merged, split])
        for node, part in zip(nodes, split.outputs, strict=True):
            old = node.outputs[0]
            part.shape, part.type = old.shape, old.type
            old.replace_all_uses_with(part)
            graph.remove(node, safe=True)
        fired += len(nodes) - 1
    graph.sort()
    return fired
