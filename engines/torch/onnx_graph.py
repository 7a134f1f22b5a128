"""Reads a graph file into nodes and tensors; the weights stay in their file, mapped into memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bundle import WEIGHTS
from ..contract import TensorSpec
from ..errors import EngineError, first_line
from ..onnx_types import E2M1, FLOAT4, INT4, dtype_of

OPSET = 24


@dataclass(frozen=True)
class Node:
    """An operator with the names of its inputs, "" for one that is left out, and of its outputs."""

    name: str
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class Graph:
    """A graph whose nodes are in an order in which they can run."""

    inputs: list[TensorSpec]
    outputs: list[TensorSpec]
    nodes: list[Node]
    constants: dict[str, Tensor]
    four_bits: frozenset[str] = frozenset()  # constants of int4, which are int8 here


def read_graph(file: Path) -> Graph:
    try:
        import onnx
    except ImportError as error:
        raise EngineError("engine torch needs the onnx package; pip install 'trt-spec[torch]'") from error
    try:
        model = onnx.load(str(file), load_external_data=False)
        weights = file.with_name(WEIGHTS)
        size = weights.stat().st_size if weights.exists() else 0
        mapped = torch.from_file(str(weights), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)
        constants = {tensor.name: _tensor(tensor, mapped) for tensor in model.graph.initializer}
        four_bits = frozenset(tensor.name for tensor in model.graph.initializer if tensor.data_type == INT4)
        nodes = [_node(node) for node in model.graph.node]
        inputs, outputs = ([_spec(value) for value in values] for values in (model.graph.input, model.graph.output))
    except Exception as error:  # from protobuf, onnx or torch, for a file that is not one of our graphs
        raise EngineError(f"engine torch cannot read {file}: {first_line(error)}; export the bundle again") from error
    opsets = {entry.domain: entry.version for entry in model.opset_import}
    if opsets.get("") != OPSET:
        raise EngineError(
            f"{file} has ONNX operators of version {opsets.get('')}, engine torch expects {OPSET}; export it again"
        )
    return Graph([spec for spec in inputs if spec.name not in constants], outputs, nodes, constants, four_bits)


def _spec(value: Any) -> TensorSpec:
    kind = value.type.tensor_type
    shape = tuple(dim.dim_param or dim.dim_value for dim in kind.shape.dim)
    return TensorSpec(value.name, str(dtype_of(kind.elem_type)).removeprefix("torch."), shape)


def _node(node: Any) -> Node:
    op = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
    attributes = {attribute.name: _attribute(attribute) for attribute in node.attribute}
    return Node(node.name, op, tuple(node.input), tuple(node.output), attributes)


def _attribute(attribute: Any) -> Any:
    from onnx import TensorProto, helper

    value = helper.get_attribute_value(attribute)
    if isinstance(value, TensorProto):
        return _tensor(value, torch.empty(0))
    return value.decode() if isinstance(value, bytes) else value


def _tensor(tensor: Any, mapped: Tensor) -> Tensor:
    from onnx import TensorProto, numpy_helper

    if tensor.data_location == TensorProto.EXTERNAL:
        where = {entry.key: entry.value for entry in tensor.external_data}
        if where["location"] != WEIGHTS:
            raise ValueError(f"the weights {tensor.name!r} lie in {where['location']!r}, expected {WEIGHTS}")
        begin = int(where.get("offset", 0))
        data = mapped[begin : begin + int(where["length"])]
    else:
        raw = tensor.raw_data or numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data
        data = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    shape = list(tensor.dims)
    if tensor.data_type == INT4:  # two in a byte, the lower half first
        halves = torch.stack((data << 4, data), -1).view(torch.int8) >> 4
        return halves.flatten()[: torch.Size(shape).numel()].view(shape)
    if tensor.data_type == FLOAT4:
        halves = torch.stack((data & 15, data >> 4), -1).flatten()[: torch.Size(shape).numel()]
        return torch.tensor(E2M1).to(torch.float8_e4m3fn)[halves.int()].view(shape)
    dtype = dtype_of(tensor.data_type)
    aligned = data if data.storage_offset() % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype).view(shape)
