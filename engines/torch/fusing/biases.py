"""A product with a stored matrix and the bias that follows it, which torch adds within the product."""

from .rewriting import Rewriting, fused


def fuse(graph: Rewriting) -> int:
    fired = 0
    for add in graph.all("Add"):
        for value, bias in (add.inputs, add.inputs[::-1]):
            product = graph.maker(value, "MatMul")
            if product is None or bias not in graph.constants or graph.only_reader(value) is not add:
                continue
            matrix = graph.constants.get(product.inputs[1])
            if matrix is None or matrix.dim() != 2 or graph.constants[bias].shape != matrix.shape[1:]:
                continue
            graph.replace([add, product], fused("BiasedProduct", [*product.inputs, bias], add.outputs))
            fired += 1
            break
    return fired
