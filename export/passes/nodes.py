"""Make nodes for a graph, and the small numbers that they read."""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from torch import Tensor

CONTRIB = "com.microsoft"  # the domain of ONNX Runtime's own operators
TURNED = (0, 2, 1, 3)  # from heads of rows to rows of heads, and back


class Nodes:
    """Nodes that are being made; the numbers are in the graph at once, the nodes when somebody puts `made` there."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph, self._tape = graph, ir.tape.Tape()

    @property
    def made(self) -> Sequence[ir.Node]:
        return self._tape.nodes

    def __call__(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        made: ir.Value = self._tape.op(op_type, inputs, attributes)
        return made

    def several(
        self, count: int, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        """Make a node with so many outputs."""
        made: Sequence[ir.Value] = self._tape.op_multi_out(
            op_type, inputs, attributes, domain=domain, num_outputs=count
        )
        return made

    def stored(self, numbers: float | Sequence[int]) -> ir.Value:
        tensor = ir.tensor(numbers, name=f"stored.{numbers}")
        if tensor.name not in self._graph.initializers:
            value = ir.Value(name=tensor.name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype))
            value.const_value = tensor
            self._graph.register_initializer(value)
        return self._graph.initializers[str(tensor.name)]


def constant(graph: ir.Graph, name: str, numbers: Tensor, dtype: ir.DataType | None) -> ir.Value:
    """Add small numbers to a graph as one of its constants."""
    assert dtype is not None
    array = (numbers.float() if numbers.is_floating_point() else numbers).contiguous().numpy()
    tensor = ir.Tensor(array.astype(dtype.numpy()), dtype=dtype, name=name)
    value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(dtype), const_value=tensor)
    graph.register_initializer(value)
    return value
