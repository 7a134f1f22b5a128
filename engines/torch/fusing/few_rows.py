"""Products with stored matrices as they are for few rows of tokens: with the operators beside them, as one operator.

That is a bias, the norm of what is multiplied, the gate or the residual after it. Steps of more rows keep the nodes
as they were, and multiply by the same memory.
"""

from dataclasses import replace
from math import frexp

from ..onnx_graph import Node
from .rewriting import Rewriting, fused

PRODUCT = "trt_spec::Product"
X, MATRIX, BIAS, RESIDUAL, SCALE = range(5)  # its inputs


def fuse(graph: Rewriting) -> int:
    """Return how many products have become of this kind."""
    products = [
        new for op in ("MatMul", "trt_spec::BiasedProduct") for node in graph.all(op) if (new := _of(graph, node))
    ]
    for gate in graph.all("trt_spec::Gate"):
        _open(graph, gate)
    for add in [*graph.all("trt_spec::AddNorm"), *graph.all("Add")]:
        _add(graph, add)
    for norm in graph.all("trt_spec::Norm"):
        _norm(graph, norm)
    return len(products)


def _of(graph: Rewriting, node: Node) -> Node | None:
    x, name, *bias = node.inputs
    matrix = graph.constants.get(name)
    if matrix is None or matrix.dim() != 2 or not matrix.is_floating_point() or len(graph.readers(name)) > 1:
        return None
    rows = f"{name}.rows"
    graph.constants[rows] = matrix.to(graph.device).t().contiguous()
    graph.constants[name] = graph.constants[rows].t()
    new = fused("Product", [x, rows, *(bias or [""]), "", ""], node.outputs)
    graph.replace([node], new)
    return new


def _open(graph: Rewriting, gate: Node) -> None:
    """Join a gate with the product whose halves are its inputs."""
    split = graph.maker(gate.inputs[0], "Split")
    if split is None or split.outputs != gate.inputs or split.attributes.get("axis") != -1:
        return
    product = graph.maker(split.inputs[0], PRODUCT)
    if product is None or any(graph.only_reader(value) is None for value in (*product.outputs, *split.outputs)):
        return
    sizes = graph.constants.get(split.inputs[1]) if len(split.inputs) > 1 else None
    if sizes is None or len(set(sizes.tolist())) > 1:
        return
    attributes = product.attributes | gate.attributes
    graph.replace([product, split, gate], replace(product, outputs=gate.outputs, attributes=attributes))


def _add(graph: Rewriting, add: Node) -> None:
    """Add a residual within the product that it is added to, and leave the norm of the sum."""
    for residual, value in (add.inputs[:2], add.inputs[1::-1]):
        product = graph.maker(value, PRODUCT)
        if product is None or product.inputs[RESIDUAL] or graph.only_reader(value) is not add or residual == value:
            continue
        if residual in graph.constants or (add.op == "trt_spec::AddNorm" and add.inputs[3]):
            continue
        total = replace(product, inputs=_with(product, RESIDUAL, residual), outputs=add.outputs[:1])
        norms = []
        if add.op == "trt_spec::AddNorm":
            norms = [fused("Norm", [add.outputs[0], add.inputs[2]], add.outputs[1:], **add.attributes)]
        graph.replace([product, add], total, *norms)
        return


def _norm(graph: Rewriting, norm: Node) -> None:
    """Norm within the product that alone reads what is normed."""
    product = graph.only_reader(norm.outputs[0], PRODUCT)
    if product is None or product.inputs.count(norm.outputs[0]) > 1 or product.inputs[X] != norm.outputs[0]:
        return
    x, scale = norm.inputs
    if norm.attributes["dtype"] != graph.constants[product.inputs[MATRIX]].dtype:
        return
    _, power = frexp(float(graph.constants[scale].abs().max()))
    inputs = (x, *_with(product, SCALE, scale)[1:])
    attributes = product.attributes | {"epsilon": norm.attributes["epsilon"], "most": 2.0 ** max(0, power)}
    graph.replace([norm, product], replace(product, inputs=inputs, attributes=attributes))


def _with(product: Node, place: int, value: str) -> tuple[str, ...]:
    return (*product.inputs[:place], value, *product.inputs[place + 1 :])
