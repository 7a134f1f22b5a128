"""A gate: SiLU or GELU of one tensor times another, as one operator."""

from ..onnx_graph import Node
from .rewriting import Rewriting, fused


def fuse(graph: Rewriting) -> int:
    fired = 0
    for product in graph.all("Mul"):
        for gate, up in (product.inputs, product.inputs[::-1]):
            if up in graph.constants or graph.only_reader(gate, "Mul") is not product or gate == up:
                continue
            if found := _silu(graph, gate) or _gelu(graph, gate):
                nodes, source, activation = found
                graph.replace([product, *nodes], fused("Gate", [source, up], product.outputs, activation=activation))
                fired += 1
                break
    return fired


def _silu(graph: Rewriting, value: str) -> tuple[list[Node], str, str] | None:
    """Find x · sigmoid(x)."""
    product = graph.maker(value, "Mul")
    if product is None:
        return None
    for x, factor in (product.inputs, product.inputs[::-1]):
        sigmoid = graph.maker(factor, "Sigmoid")
        if sigmoid and sigmoid.inputs[0] == x and graph.only_reader(factor) is product:
            return [product, sigmoid], x, "silu"
    return None


def _gelu(graph: Rewriting, value: str) -> tuple[list[Node], str, str] | None:
    node = graph.maker(value, "Gelu")
    if node is None:
        return None
    kinds = {"none": "gelu", "tanh": "gelu_tanh"}
    return [node], node.inputs[0], kinds[node.attributes.get("approximate", "none")]
