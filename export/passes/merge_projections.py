"""Let the matrices of queries, keys and values be one, and split what comes out: one wide product takes less time.

Others that read the same tokens stay apart: engines compute an activation within the product that it follows, and so
save more than a wider product would.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir


@dataclass(frozen=True)
class _Projection:
    """A product with a stored matrix, and the bias that follows it."""

    nodes: tuple[ir.Node, ...]  # from last to first: Add if there is one, MatMul, DequantizeLinear if there is one
    product: ir.Node
    block: int  # rows of the matrix that share a scale; 0 without scales
    matrix: tuple[ir.TensorProtocol, ...]  # with its scales, if it has some
    bias: tuple[ir.TensorProtocol, ...]  # one number for each column, or nothing

    @property
    def columns(self) -> int:
        return self.matrix[0].shape.numpy()[1]

    @property
    def makes_heads(self) -> bool:
        return [use.node.op_type for use in self.nodes[0].outputs[0].uses()] == ["Reshape"]


def merge_projections(model: ir.Model) -> int:
    """Merge those that are stored alike, bit for bit as they are; returns how many products that saves."""
    alike: dict[object, list[_Projection]] = defaultdict(list)
    for node in model.graph:
        if node.op_type == "MatMul" and (found := _projection(node)) and found.makes_heads:
            alike[node.inputs[0], found.matrix[0].dtype, found.block, len(found.bias)].append(found)
    several = [parts for parts in alike.values() if len(parts) > 1]
    for parts in several:
        _merge(model.graph, parts)
    return sum(len(parts) - 1 for parts in several)


def _projection(product: ir.Node) -> _Projection | None:
    """Describe a product with a matrix that nothing else reads."""
    matrix, output = product.inputs[1], product.outputs[0]
    widen = matrix.producer() if matrix else None
    nodes: tuple[ir.Node, ...] = (product,)
    if widen is None:
        stored, block = _stored([matrix], 2), 0
    elif widen.op_type == "DequantizeLinear" and len(widen.outputs[0].uses()) == 1:
        stored, block, nodes = _stored(widen.inputs, 2), widen.attributes.get_int("block_size", 0), (product, widen)
    else:
        return None
    if not stored:
        return None
    users = list(output.uses())
    if len(users) == 1 and users[0].node.op_type == "Add":
        bias = _stored([users[0].node.inputs[1 - users[0].idx]], 1)
        if bias and bias[0].shape.numpy()[0] == stored[0].shape.numpy()[1]:
            return _Projection((users[0].node, *nodes), product, block, stored, bias)
    return _Projection(nodes, product, block, stored, ())


def _stored(values: Iterable[ir.Value | None], rank: int) -> tuple[ir.TensorProtocol, ...]:
    """Return the tensors that these values stand for; nothing if one has another rank or is read elsewhere, too."""
    found = []
    for value in values:
        if value is None or not value.is_initializer() or len(value.uses()) > 1 or value.const_value is None:
            return ()
        found.append(value.const_value)
    return tuple(found) if all(len(tensor.shape) == rank for tensor in found) else ()


def _merge(graph: ir.Graph, parts: Sequence[_Projection]) -> None:
    first, outputs = parts[0], [part.nodes[0].outputs[0] for part in parts]
    matrix = [_side_by_side(graph, tensors) for tensors in zip(*(part.matrix for part in parts), strict=True)]
    bias = [_side_by_side(graph, tensors) for tensors in zip(*(part.bias for part in parts), strict=True)]
    name, nodes = matrix[0].name, []

    def add(kind: str, inputs: Sequence[ir.Value | None], **attributes: int) -> ir.Value:
        node = ir.node(kind, inputs, attributes)
        node.outputs[0].name, node.outputs[0].type = f"{name}.{kind}", outputs[0].type
        nodes.append(node)
        return node.outputs[0]

    if first.block:
        matrix = [add("DequantizeLinear", matrix, axis=0, block_size=first.block)]
    found = add("MatMul", [first.product.inputs[0], *matrix])
    if bias:
        found = add("Add", [found, *bias])
    columns = _store(graph, ir.tensor([part.columns for part in parts], ir.DataType.INT64, f"{name}.columns"))
    split = ir.node("Split", [found, columns], {"axis": -1}, num_outputs=len(parts))
    graph.insert_before(first.product, [*nodes, split])
    for part, old, new in zip(parts, outputs, split.outputs, strict=True):
        new.name, new.shape, new.type = f"{old.name}.part", old.shape, old.type
        old.replace_all_uses_with(new)
        for node in part.nodes:
            inputs = node.inputs
            graph.remove(node, safe=True)
            for value in inputs:
                if value is not None and value.is_initializer():
                    del graph.initializers[str(value.name)]


def _side_by_side(graph: ir.Graph, parts: Sequence[ir.TensorProtocol]) -> ir.Value:
    """Store the columns of all parts in one tensor, which is made when it is written."""

    def make() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([part.numpy() for part in parts], axis=-1), parts[0].dtype)

    *rows, _ = parts[0].shape.numpy()
    shape = ir.Shape([*rows, sum(part.shape.numpy()[-1] for part in parts)])
    return _store(graph, ir.LazyTensor(make, parts[0].dtype, shape, name=f"{parts[0].name}.merged"))


def _store(graph: ir.Graph, tensor: ir.TensorProtocol) -> ir.Value:
    value = ir.Value(
        name=tensor.name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value
