"""Heads that an export stacked for ONNX Runtime, as more rows of the heads that share their keys: as they were."""

from dataclasses import replace

from .rewriting import Rewriting

STACKED = ".stacked_"  # in the names of what has its rows in other heads


def fuse(graph: Rewriting) -> int:
    """Return how many attentions were stacked."""
    fired = 0
    for node in graph.all("Attention"):
        if len(node.inputs) < 4:
            continue
        query, keys, values, mask, *others = node.inputs
        stacked, rows, apart = graph.maker(query), graph.maker(mask), graph.only_reader(node.outputs[0])
        if stacked is None or rows is None or apart is None or STACKED not in query:
            continue
        if (stacked.op, apart.op) != ("Reshape", "Reshape") or STACKED not in apart.outputs[0]:
            continue
        same_for_all = rows.op == "Concat" and len(set(rows.inputs)) == 1
        if not same_for_all and STACKED not in mask:
            continue
        inputs = (stacked.inputs[0], keys, values, rows.inputs[0], *others)
        old = [one for one in (stacked, rows) if len(graph.readers(one.outputs[0])) == 1]
        graph.replace([node, apart, *old], replace(node, inputs=inputs, outputs=apart.outputs))
        fired += 1
    return fired
