"""Runs the bundle's graph as torch ops on any torch device, converted for each shape of a call, eager or compiled."""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate
from torch.overrides import TorchFunctionMode

from ..contract import PREFILL_WIDTH, WIDEST_STEP, Contract, TensorSpec
from ..engine import Step, chunks
from ..errors import EngineError, first_line
from .onnx_graph import Graph, Node, read_graph
from .ops import FIXED, IGNORED, OPS

Shape = tuple[tuple[str, int], ...]  # the size of each symbol of the contract

KEPT_SHAPES = 256  # converted graphs, a few hundred kilobytes each
TRIAL: Shape = (("batch", 2), ("capacity", 5), ("rows", 2), ("width", 3))


def open_engines(
    name: str, models: Sequence[tuple[Path, Contract]], device: str, exact_weights: bool, alone: bool
) -> "list[TorchEngine]":
    """Open the graphs; their weights are always exact here."""
    return [TorchEngine(*model, device, compiled=name == "torch-compiled") for model in models]


class TorchEngine:
    """See `Engine`. Quantised matrices are widened when the graph is opened, rows of an embedding when they are read.

    A step reads no tensor on the host and allocates only by torch's own allocator, so a caller may capture it.
    """

    verify_width = WIDEST_STEP
    takes_trees = True
    own_threads = reads_together = False

    def __init__(self, graph: Path, contract: Contract, device: str, compiled: bool) -> None:
        try:
            torch.zeros(1, device=device).cpu()
        except (RuntimeError, AssertionError) as error:
            raise EngineError(
                f"engine torch cannot use the device {device!r} ({first_line(error)}); expected cpu or cuda"
            ) from error
        self.contract, self.device, self._compiled = contract, device, compiled
        # Full capacity is cheap on a GPU, and compiled code would be compiled anew for every length.
        self.static_capacity = self.reads_prefixes = compiled or torch.device(device).type != "cpu"
        read = read_graph(graph)
        contract.check(str(graph), read.inputs, read.outputs)
        _refuse_unknown(str(graph), read.nodes)
        _refuse_copied_cache(str(graph), contract, read.nodes)
        self._nodes, self._constants = _fold(read, device)
        self._module = lru_cache(KEPT_SHAPES)(self._convert)
        self._compiled_module = lru_cache(KEPT_SHAPES)(self._compile)
        self._computed = [spec for spec in contract.outputs if spec.name not in contract.aliases]
        self._convert(TRIAL)  # refuse now what cannot be converted

    def reserve(self, rows: int, capacity: int) -> None:
        """Accept all caches."""

    def prefill_widths(self, tokens: int) -> list[int]:
        """Use powers of two, the largest first: a prompt may have any width, and not each is worth a conversion."""
        return [width for chunk in chunks(tokens, PREFILL_WIDTH) for width in _powers_of_two(chunk)]

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        sizes = self.contract.sizes({**inputs, **outputs})
        shape = tuple(sorted(sizes.items()))
        module = self._module(shape)
        given = [inputs[spec.name] for spec in self.contract.inputs]
        wanted = [outputs[spec.name] for spec in self._computed]
        again = False

        def run() -> None:
            nonlocal again
            try:
                with torch.inference_mode():
                    # A step that repeats belongs to a round; prefill steps run too seldom to compile.
                    compute = self._compiled_module(shape) if self._compiled and again else module
                    for place, found in zip(wanted, compute(*given), strict=True):
                        place.copy_(found)
                again = True
            except torch.OutOfMemoryError:  # the decoder opened all models and says how much they need
                raise
            except (RuntimeError, IndexError) as error:
                raise EngineError(
                    f"torch failed at batch {sizes['batch']}, width {sizes['width']}: {first_line(error)}"
                ) from error

        return Step(inputs, outputs, run)

    def capturable(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def settle(self) -> None: ...

    def close(self) -> None:
        self._constants = {}
        self._module.cache_clear()
        self._compiled_module.cache_clear()

    def _compile(self, shape: Shape) -> Callable[..., tuple[Tensor, ...]]:
        return torch.compile(self._module(shape), fullgraph=True, dynamic=False)

    def _convert(self, shape: Shape) -> fx.GraphModule:
        """Convert the graph for these sizes, to all outputs except the cache, which is written in place."""
        sizes = dict(shape)
        recorder = _Recorder(self.device)
        values = dict(self._constants)
        for spec in self.contract.inputs:
            values[spec.name] = recorder.input(spec, sizes)
        with recorder:
            for node in self._nodes:
                _run(node, values)
        return recorder.module([values[spec.name] for spec in self._computed])


def _powers_of_two(width: int) -> list[int]:
    return [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]


class _Recorder(TorchFunctionMode):
    """Computes what follows from constants and shapes, and records what is done to the inputs.

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
        self._written[id(tensor)] = tensor, self._graph.placeholder(spec.name)
        return tensor

    def module(self, outputs: Sequence[Tensor]) -> fx.GraphModule:
        self._graph.output(tuple(self._node(output) for output in outputs))
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
                self._written[id(output)] = output, self._graph.call_function(func, *arguments)
            elif isinstance(output, tuple) and any(isinstance(part, Tensor) for part in output):
                node = self._graph.call_function(func, *arguments)
                for index, part in enumerate(output):
                    self._written[id(part)] = part, self._graph.call_function(operator.getitem, (node, index))
        return self._outputs[key]

    def _node(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._written:
            name = f"constant_{len(self._written)}"
            self._root.register_buffer(name, value.to(self._device))
            self._written[id(value)] = value, self._graph.get_attr(name)
        return self._written[id(value)][1]


def _devices(call: Any) -> set[str]:
    found: set[str] = set()
    map_aggregate(call, lambda x: found.add(x.device.type) if isinstance(x, Tensor) else None)
    return found


def _on(device: str, call: Any) -> Any:
    return map_aggregate(call, lambda x: x.to(device) if isinstance(x, Tensor) else x)


def _run(node: Node, values: dict[str, Tensor]) -> None:
    inputs = [values[name] if name else None for name in node.inputs]
    attributes = {name: value for name, value in node.attributes.items() if name not in (*FIXED, *IGNORED)}
    try:
        outputs = OPS[node.op](*inputs, **attributes)
        values.update(zip(node.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))
    except Exception as error:  # torch raises a dozen unrelated types
        raise EngineError(f"engine torch cannot convert {node.op} {node.name!r}: {first_line(error)}") from error


def _fold(graph: Graph, device: str) -> tuple[list[Node], dict[str, Tensor]]:
    """Return the nodes that depend on an input, and the constants they read: on the device, except shapes and axes."""
    values, nodes = dict(graph.constants), []
    for node in graph.nodes:
        if all(name in values for name in node.inputs if name):
            _run(node, values)
        else:
            nodes.append(node)
    read = {name for node in nodes for name in node.inputs}

    def place(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.int64 and tensor.dim() <= 1 else tensor.to(device)

    return nodes, {name: place(tensor) for name, tensor in values.items() if name in read}


def _refuse_unknown(graph: str, nodes: list[Node]) -> None:
    for node in nodes:
        if node.op not in OPS:
            raise EngineError(
                f"{graph} has the operator {node.op} ({node.name}), which engine torch does not support; use another"
            )
        for name, value in node.attributes.items():
            if name in FIXED and value != FIXED[name]:
                raise EngineError(
                    f"{graph} has the operator {node.op} ({node.name}) with {name} = {value!r}; engine torch "
                    f"supports only {FIXED[name]!r}"
                )


def _refuse_copied_cache(graph: str, contract: Contract, nodes: list[Node]) -> None:
    """Refuse a graph where anything but its TensorScatter reads a cache input: it might see it before or after."""
    makers = {output: node for node in nodes for output in node.outputs}
    for present, past in contract.aliases.items():
        readers = [node.op for node in nodes if past in node.inputs and node.op != "Shape"]
        maker = makers.get(present)
        if readers != ["TensorScatter"] or maker is None or (maker.op, maker.inputs[0]) != ("TensorScatter", past):
            raise EngineError(
                f"{graph} does not make {present} from {past} by one TensorScatter, so not in place; export it again"
            )
