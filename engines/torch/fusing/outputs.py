"""The last operator of an output, which computes it in the caller's memory instead of a copy of it."""

from ..onnx_graph import Node
from .rewriting import Rewriting, fused

PLACE = "{}.place"  # the value that is the caller's memory of an output


def fuse(graph: Rewriting) -> int:
    fired = 0
    for output in graph.outputs:
        node = graph.maker(output)
        if node is None or graph.readers(output):
            continue
        place = PLACE.format(output)
        if node.op == "Cast":
            graph.replace([node], fused("CastInto", [node.inputs[0], place], [output]))
        elif found := _product(graph, node):
            *old, product = found
            transposed = product.attributes.get("transB", 0)
            new = fused("ProductInto", [*product.inputs, place], [output], transposed=transposed)
            graph.replace([*old, product], new)
        else:
            continue
        fired += 1
    return fired


def _product(graph: Rewriting, node: Node) -> list[Node] | None:
    """Find a product with a stored matrix, alone or after a change of its shape."""
    if node.op == "Reshape":
        product = graph.maker(node.inputs[0])
        if product is None or graph.only_reader(node.inputs[0]) is not node:
            return None
        found = _product(graph, product)
        return [node, *found] if found else None
    if node.op not in ("MatMul", "Gemm") or len(node.inputs) != 2:
        return None
    matrix = graph.constants.get(node.inputs[1])
    return [node] if matrix is not None and matrix.dim() == 2 else None
