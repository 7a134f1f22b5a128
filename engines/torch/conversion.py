"""Converts a graph's nodes to torch ops: runs them on tensors without data, and records the ops."""

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from ..contract import TensorSpec
from ..errors import EngineError, first_line
from .onnx_graph import Graph, Node
from .ops import FIXED, IGNORED, OPS

VALUE = "example_value"  # what torch's compiler, too, calls the tensor without data of a node in its `meta`


class Recorder(TorchFunctionMode):
    """Computes every tensor that follows from constants and shapes, and records the ops on all others.

    A tensor that depends on an input is a meta tensor, the output of a recorded node. The same call on the same tensors
    is recorded once.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._graph, self._root = fx.Graph(), nn.Module()
        self._written: dict[int, tuple[Tensor, fx.Node]] = {}  # by id, which is unique while the tensor lives
        self._outputs: dict[tuple[Any, str], Any] = {}  # by function and arguments

    def input(self, spec: TensorSpec, sizes: Mapping[str, int]) -> Tensor:
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
        tensor = torch.empty(shape, dtype=getattr(torch, spec.dtype), device="meta")
        self._note(tensor, self._graph.placeholder(spec.name.replace(".", "_")))
        return tensor

    def module(self) -> fx.GraphModule:
        self._graph.output(())
        return fx.GraphModule(self._root, self._graph)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call: Any = (tuple(args), kwargs or {})
        devices = _devices(call)
        if "meta" not in devices:
            if len(devices) > 1:  # a shape meets a weight
                call = _on(self._device, call)
            return func(*call[0], **call[1])
        arguments: Any = map_aggregate(call, self._node)
        key = (func, repr(arguments))
        if key not in self._outputs:
            args, kwargs = _on("meta", call)
            self._outputs[key] = output = func(*args, **kwargs)
            if isinstance(output, Tensor):
                self._note(output, self._graph.call_function(func, *arguments))
            elif output is None:  # it writes
                self._graph.call_function(func, *arguments)
            elif isinstance(output, tuple) and any(isinstance(part, Tensor) for part in output):
                node = self._graph.call_function(func, *arguments)
                for index, part in enumerate(output):
                    self._note(part, self._graph.call_function(operator.getitem, (node, index)))
        return self._outputs[key]

    def _note(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta[VALUE] = tensor.to("meta")
        self._written[id(tensor)] = tensor, node

    def _node(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._written:
            name = f"constant_{len(self._written)}"
            self._root.register_buffer(name, value if value.is_meta else value.to(self._device))
            self._note(value, self._graph.get_attr(name))
        return self._written[id(value)][1]


def _devices(call: Any) -> set[str]:
    found: set[str] = set()
    map_aggregate(call, lambda x: found.add(x.device.type) if isinstance(x, Tensor) else None)
    return found


def _on(device: str, call: Any) -> Any:
    return map_aggregate(call, lambda x: x.to(device) if isinstance(x, Tensor) else x)


def run_node(node: Node, values: dict[str, Tensor]) -> None:
    inputs = [values[name] if name else None for name in node.inputs]
    attributes = {name: value for name, value in node.attributes.items() if name not in (*FIXED, *IGNORED)}
    try:
        outputs = OPS[node.op](*inputs, **attributes)
        values.update(zip(node.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))
    except Exception as error:  # torch raises a dozen unrelated types
        raise EngineError(f"engine torch cannot convert {node.op} {node.name!r}: {first_line(error)}") from error


def fold(graph: Graph, kept: Collection[str] = ()) -> tuple[list[Node], dict[str, Tensor]]:
    """Return the nodes that depend on an input or make one of the values `kept`, and all constants."""
    values, nodes = dict(graph.constants), []
    for node in graph.nodes:
        if all(name in values for name in node.inputs if name) and node.outputs[0] not in kept:
            run_node(node, values)
        else:
            nodes.append(node)
    return nodes, values


def place(constants: Mapping[str, Tensor], nodes: Sequence[Node], device: str) -> dict[str, Tensor]:
    """Return the constants that the nodes read: on the device, except shapes and axes."""

    def on_device(tensor: Tensor) -> Tensor:
        stays = tensor.is_meta or (tensor.dtype == torch.int64 and tensor.dim() <= 1)
        return tensor if stays else tensor.to(device)

    read = {name for node in nodes for name in node.inputs}
    return {name: on_device(tensor) for name, tensor in constants.items() if name in read}
