"""Products with matrices of small numbers, which stay as small on the device."""

from torch import Tensor

from ..kernels.narrow_product import packed
from ..onnx_graph import Graph, Node
from .rewriting import Rewriting, fused


def kept(graph: Graph) -> set[str]:
    """Return the matrices of small numbers that a product reads and nothing else; others are widened when opened."""
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    found = set()
    for node in graph.nodes:
        if node.op != "DequantizeLinear" or node.inputs[0] not in graph.constants:
            continue
        numbers, [matrix] = graph.constants[node.inputs[0]], node.outputs
        uses = [(one.op, one.inputs.index(matrix)) for one in readers.get(matrix, ())]
        if numbers.dim() == 2 and uses == [("MatMul", 1)] and _blocks(node, numbers):
            found.add(matrix)
    return found


def _blocks(node: Node, numbers: Tensor) -> int:
    """Return in how many blocks of rows each column has a scale; 0 if that is not how the scales lie."""
    axis, block = node.attributes.get("axis", 1), node.attributes.get("block_size", 0)
    if block:
        return len(numbers) // block if axis == 0 and len(numbers) % block == 0 else 0
    return 1 if axis in (1, -1) and len(node.inputs) == 2 else 0


def fuse(graph: Rewriting) -> int:
    fired = 0
    for product in graph.all("MatMul"):
        node = graph.maker(product.inputs[1], "DequantizeLinear")
        if node is None or any(name not in graph.constants for name in node.inputs):
            continue
        four_bits = node.inputs[0] in graph.four_bits
        numbers, scales, *zeros = (graph.constants.pop(name).to(graph.device) for name in node.inputs)
        across, columns = numbers.t().contiguous(), numbers.shape[1]
        narrow = {
            "numbers": packed(across) if four_bits and across.shape[1] % 2 == 0 else across,
            "scales": scales.expand(_blocks(node, numbers), columns).t().contiguous(),
        }
        if zeros:
            narrow["zeros"] = zeros[0].t().contiguous()
        names = {kind: f"{node.inputs[0]}.narrow.{kind}" for kind in narrow}
        graph.constants |= {names[kind]: tensor for kind, tensor in narrow.items()}
        graph.replace([product, node], fused("NarrowProduct", [product.inputs[0], *names.values()], product.outputs))
        fired += 1
    return fired
