"""Products of one tensor with several stored matrices, as one product whose columns are split."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..onnx_graph import Node
from .rewriting import Rewriting


@dataclass(frozen=True)
class _Product:
    """A product with a stored matrix that nothing else reads, and the bias that follows it."""

    product: Node
    widened: Node | None  # the DequantizeLinear that makes the matrix
    bias: Node | None  # Add

    @property
    def nodes(self) -> list[Node]:
        return [node for node in (self.product, self.widened, self.bias) if node]

    @property
    def stored(self) -> Sequence[str]:
        return (self.widened or self.product).inputs[0 if self.widened else 1 :]

    @property
    def output(self) -> str:
        return (self.bias or self.product).outputs[0]

    def bias_name(self, graph: Rewriting) -> str | None:
        return next((name for name in self.bias.inputs if name in graph.constants), None) if self.bias else None


def fuse(graph: Rewriting) -> int:
    """Return how many products that saves. The parts of a matrix are freed as soon as the whole is on the device."""
    alike: dict[object, list[_Product]] = defaultdict(list)
    for node in graph.all("MatMul"):
        if found := _product(graph, node):
            matrices = [graph.constants[name] for name in found.stored]
            blocks = found.widened.attributes if found.widened else {}
            kind = tuple((matrix.dtype, matrix.shape[:-1]) for matrix in matrices), tuple(sorted(blocks.items()))
            alike[node.inputs[0], kind].append(found)
    several = [parts for parts in alike.values() if len(parts) > 1]
    for parts in several:
        _merge(graph, parts)
    return sum(len(parts) - 1 for parts in several)


def _product(graph: Rewriting, product: Node) -> _Product | None:
    widened = graph.maker(product.inputs[1], "DequantizeLinear")
    stored = widened.inputs if widened else product.inputs[1:]
    if widened and graph.only_reader(product.inputs[1]) is not product:
        return None
    for name in stored:
        if name not in graph.constants or len(graph.readers(name)) > 1:
            return None
    matrix = graph.constants[stored[0]]
    columns = matrix.shape[-1]
    if matrix.dim() != 2 or any(graph.constants[name].shape[-1:] != (columns,) for name in stored):
        return None
    bias = graph.only_reader(product.outputs[0], "Add")
    beside = [graph.constants[name] for name in bias.inputs if name in graph.constants] if bias else []
    has_bias = [tensor.shape for tensor in beside] == [(columns,)]
    return _Product(product, widened, bias if has_bias else None)


def _merge(graph: Rewriting, parts: Sequence[_Product]) -> None:
    first = parts[0]
    columns = [graph.constants[part.stored[0]].shape[1] for part in parts]
    biases = [graph.constants[name] if (name := part.bias_name(graph)) else None for part in parts]
    whole = f"{first.stored[0]}.beside"
    names = [f"{whole}.{place}" for place in range(len(first.stored))]
    for place, name in enumerate(names):
        graph.join([part.stored[place] for part in parts], name)
    new, matrix = [], names[0]
    if first.widened:
        matrix = f"{whole}.wide"
        new.append(Node(matrix, "DequantizeLinear", tuple(names), (matrix,), first.widened.attributes))
    found = f"{whole}.product"
    new.append(Node(found, "MatMul", (first.product.inputs[0], matrix), (found,), {}))
    like = next((bias for bias in biases if bias is not None), None)
    if like is not None:
        all_biases = [
            like.new_zeros(size) if bias is None else bias for bias, size in zip(biases, columns, strict=True)
        ]
        graph.constants[f"{whole}.bias"] = torch.cat(all_biases)
        new.append(Node(f"{found}.biased", "Add", (found, f"{whole}.bias"), (f"{found}.biased",), {}))
        found = f"{found}.biased"
    graph.constants[f"{whole}.columns"] = torch.tensor(columns)
    outputs = tuple(part.output for part in parts)
    new.append(Node(f"{whole}.split", "Split", (found, f"{whole}.columns"), outputs, {"axis": -1}))
    graph.replace([node for part in parts for node in part.nodes], *new)
