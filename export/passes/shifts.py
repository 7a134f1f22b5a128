"""Add what the shifts of blocks come to, to products with a matrix and to rows that are looked up in one."""

import onnx_ir as ir
import torch

from .nodes import constant


def add_shifts(graph: ir.Graph, product: ir.Node, shifts: ir.Value, block: int) -> None:
    """Add to a product what the shifts of its matrix make of it: each times the sum of its block's inputs."""
    given, made = product.inputs[0], product.outputs[0]
    assert given is not None
    assert made.shape is not None
    users, is_output = list(made.uses()), made.is_graph_output()
    assert not is_output or made.name == graph.outputs[0].name
    name = str(made.name)
    shape = constant(
        graph, f"{name}.blocks", torch.tensor([0] * (len(made.shape) - 1) + [-1, block]), ir.DataType.INT64
    )
    axis = constant(graph, f"{name}.axis", torch.tensor([-1]), ir.DataType.INT64)
    apart = ir.node("Reshape", [given, shape])
    sums = ir.node("ReduceSum", [apart.outputs[0], axis], {"keepdims": 0})
    more = ir.node("MatMul", [sums.outputs[0], shifts])
    whole = ir.node("Add", [made, more.outputs[0]])
    for node, end in ((apart, "apart"), (sums, "sums"), (more, "more"), (whole, "whole")):
        node.outputs[0].name, node.outputs[0].type = f"{name}.{end}", made.type
    whole.outputs[0].shape = made.shape
    graph.insert_after(product, [apart, sums, more, whole])
    for use in users:
        use.node.replace_input_with(use.idx, whole.outputs[0])
    if is_output:
        graph.outputs[0] = whole.outputs[0]
        made.name, whole.outputs[0].name = f"{name}.unshifted", name


def shifted(graph: ir.Graph, widen: ir.Node, shifts: ir.Value, block: int) -> ir.Value:
    """Add to rows that were looked up the shift of each of their blocks."""
    wide, name = widen.outputs[0], str(widen.outputs[0].name)
    forms = {"apart": [0, 0, -1, block], "whole": [0, 0, -1]}
    shapes = {
        end: constant(graph, f"{name}.{end}.shape", torch.tensor(form), ir.DataType.INT64)
        for end, form in forms.items()
    }
    axis = constant(graph, f"{name}.axis", torch.tensor([-1]), ir.DataType.INT64)
    apart = ir.node("Reshape", [wide, shapes["apart"]])
    each = ir.node("Unsqueeze", [shifts, axis])
    added = ir.node("Add", [apart.outputs[0], each.outputs[0]])
    whole = ir.node("Reshape", [added.outputs[0], shapes["whole"]])
    for node, end in ((apart, "apart"), (each, "each"), (added, "added"), (whole, "whole")):
        node.outputs[0].name, node.outputs[0].type = f"{name}.{end}", wide.type
    whole.outputs[0].shape = wide.shape
    graph.insert_after(widen, [apart, each, added, whole])
    return whole.outputs[0]
