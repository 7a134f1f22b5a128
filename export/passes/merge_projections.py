"""Let the matrices of queries, keys and values be one, and split what comes out: one wide product takes less time.

Others that read the same tokens stay apart: OpenVINO computes an activation within the product that it follows, and
prompts took longer where gate and up were merged.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

MERGED = "trt_spec.merged"  # of a product: the names of the matrices that are one in it, and the columns of each


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
            stored = found.matrix[0].dtype, found.block, len(found.matrix), len(found.bias)
            alike[node.inputs[0], stored].append(found)
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
    product, tape = parts[0].product, ir.tape.Tape()
    matrix, bias = (
        [tape.initializer(_side_by_side(tensors)) for tensors in zip(*each, strict=True)]
        for each in ([part.matrix for part in parts], [part.bias for part in parts])
    )
    columns = [part.columns for part in parts]
    sizes = tape.initializer(ir.tensor(columns, ir.DataType.INT64, f"{matrix[0].name}.columns"))
    if block := parts[0].block:
        matrix = [tape.op("DequantizeLinear", matrix, {"axis": 0, "block_size": block})]
    found = tape.op("MatMul", [product.inputs[0], *matrix])
    of = [f"{part.product.inputs[1].name} {part.columns}" for part in parts if part.product.inputs[1] is not None]
    tape.nodes[-1].metadata_props[MERGED] = " ".join(of)
    if bias:
        found = tape.op("Add", [found, *bias])
    split = tape.op_multi_out("Split", [found, sizes], {"axis": -1}, num_outputs=len(parts))
    for stored in tape.initializers:
        graph.register_initializer(stored)
    for node in tape.nodes:
        for output in node.outputs:
            output.type = product.outputs[0].type
    graph.insert_before(product, tape.nodes)
    for part, new in zip(parts, split, strict=True):
        old = part.nodes[0].outputs[0]
        new.shape = old.shape
        old.replace_all_uses_with(new)
        for node in part.nodes:
            read = node.inputs
            graph.remove(node, safe=True)
            for value in read:
                if value is not None and value.is_initializer():
                    del graph.initializers[str(value.name)]


def _side_by_side(parts: Sequence[ir.TensorProtocol]) -> ir.TensorProtocol:
    """Return the columns of all parts as one tensor, which is made when it is written."""

    def make() -> ir.TensorProtocol:
        return ir.tensor(np.concatenate([part.numpy() for part in parts], axis=-1), parts[0].dtype)

    *rows, _ = parts[0].shape.numpy()
    shape = ir.Shape([*rows, sum(part.shape.numpy()[-1] for part in parts)])
    return ir.LazyTensor(make, parts[0].dtype, shape, name=f"{parts[0].name}.merged")
