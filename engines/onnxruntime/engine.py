"""ONNX Runtime on the CPU or a GPU: one session per graph, all tensors in torch memory, the cache written in place."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..bundle import WEIGHTS
from ..contract import PREFILL_WIDTH, WIDEST_STEP, Contract, TensorSpec
from ..cores import usable_cores
from ..engine import Step, chunks
from ..errors import EngineError, first_line
from ..onnx_types import DTYPES

ONNX_TYPES = {dtype: number for number, dtype in DTYPES.items()}
WARM_UP = 2  # runs of a step before it becomes a CUDA graph
GPU = "CUDAExecutionProvider"
SMALL_BYTES = 8 * 2**20  # one thread reads this many weights before others have woken up


@dataclass(frozen=True)
class Threads:
    """How many threads a session has, and whether they stay awake for a while after a run."""

    count: int
    stay_awake: bool


def open_engines(
    name: str, models: Sequence[tuple[Path, Contract]], device: str, exact_weights: bool, alone: bool
) -> "list[OnnxRuntimeEngine]":
    shares = share_threads([graph for graph, _ in models], alone)
    return [
        OnnxRuntimeEngine(*model, device, threads, exact_weights) for model, threads in zip(models, shares, strict=True)
    ]


class OnnxRuntimeEngine:
    """See `Engine`. On the CPU the cache may have any length: binding another one costs microseconds.

    On a GPU it runs on the stream that was torch's current one when it was opened, and steps that repeat run as CUDA
    graphs.
    """

    verify_width = WIDEST_STEP
    takes_trees = True
    reads_prefixes = False

    def __init__(self, graph: Path, contract: Contract, device: str, threads: Threads, exact_weights: bool) -> None:
        self.contract, self.device = contract, device
        if device != "cpu" and device.partition(":")[0] != "cuda":
            raise EngineError(f"engine onnxruntime runs on the device cpu or cuda, not on {device!r}; name one of them")
        self.static_capacity = self._on_gpu = device != "cpu"
        self.own_threads = self.reads_together = not self._on_gpu  # on a GPU other kernels read several rows
        if contract.dtype != "float32" and not self._on_gpu:
            raise EngineError(
                f"{graph} is {contract.dtype}, for which ONNX Runtime has no CPU kernels; export with --dtype float32"
            )
        self._session: Any = open_session(graph, threads, exact_weights, device)
        contract.check(str(graph), *(_specs(tensors) for tensors in _interface(self._session)))
        self._graph_ids = itertools.count(1)

    def reserve(self, rows: int, capacity: int) -> None:
        """Accept all caches."""

    def prefill_widths(self, tokens: int) -> list[int]:
        return chunks(tokens, PREFILL_WIDTH)

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        sizes = self.contract.sizes({**inputs, **outputs})
        session, binding = self._session, self._session.io_binding()
        kind, number = torch.device(self.device).type, torch.device(self.device).index or 0
        for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, tensor in tensors.items():
                assert tensor.is_contiguous(), f"{name} must be contiguous"
                bind(name, kind, number, ONNX_TYPES[tensor.dtype], list(tensor.shape), tensor.data_ptr())
        settings = self._run_settings() if self._on_gpu else itertools.repeat(None)
        wait = self._on_gpu and not torch.cuda.current_stream(self.device).cuda_stream

        def run(tensors: object = (inputs, outputs)) -> None:  # the default keeps their memory alive
            if wait:  # if torch is on the default stream, the session has a stream of its own
                torch.cuda.synchronize(self.device)
            try:
                session.run_with_iobinding(binding, next(settings))
            except Exception as error:  # the bindings raise a dozen unrelated types
                raise EngineError(
                    f"ONNX Runtime failed at batch {sizes['batch']}, width {sizes['width']}: {first_line(error)}"
                ) from error
            if wait:
                torch.cuda.synchronize(self.device)

        return Step(inputs, outputs, run)

    def _run_settings(self) -> Iterator[Any]:
        """Yield the settings of each run. Most steps of a prompt run once and are not worth a graph."""
        yield from itertools.repeat(_on_gpu(-1), WARM_UP)
        yield from itertools.repeat(_on_gpu(next(self._graph_ids)))

    def capturable(self) -> bool:
        return False  # a session's work cannot be part of the caller's graph

    def settle(self) -> None: ...

    def close(self) -> None:
        self._session = None


def _on_gpu(graph_id: int) -> Any:
    """Make the settings to run as this CUDA graph, -1 for none, without waiting for the end."""
    import onnxruntime

    settings = onnxruntime.RunOptions()
    settings.add_run_config_entry("disable_synchronize_execution_providers", "1")
    settings.add_run_config_entry("gpu_graph_id", str(graph_id))
    return settings


def share_threads(graphs: Sequence[Path], alone: bool = True) -> list[Threads]:
    """Divide the cores among models that take turns in a round.

    On a small machine, a worker of one model that spins while another model runs doubles the other's time. A worker
    that sleeps must be woken, which costs each run as much as a whole run of a small model. So a small model has one
    thread, a single large one keeps its workers awake, and several large ones send theirs to sleep when a run ends; so
    does a large one that is not `alone`, because the other model is in another engine.
    """
    small = [_weight_bytes(graph) <= SMALL_BYTES for graph in graphs]
    alone = alone and small.count(False) == 1
    # The library's default counts the machine's cores, not those this process may use.
    cores = usable_cores()
    return [Threads(1, stay_awake=False) if is_small else Threads(cores, stay_awake=alone) for is_small in small]


def _weight_bytes(graph: Path) -> int:
    return sum(file.stat().st_size for file in (graph, graph.with_name(WEIGHTS)) if file.exists())


def open_session(graph: Path, threads: Threads, exact_weights: bool = False, device: str = "cpu") -> Any:
    extra = "cpu" if device == "cpu" else "cuda"
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineError(
            f"engine onnxruntime needs the onnxruntime package; pip install 'trt-spec[{extra}]'"
        ) from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads.count
    # It plans for each set of shapes, which change as the cache grows: no faster here, and each plan keeps memory.
    options.enable_mem_pattern = False
    if not threads.stay_awake:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    # The engine fuses quantised matrices into MatMulNBits, which computes in int8 (4) or in the input's type (0).
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0" if exact_weights else "4")
    options.log_severity_level = 3
    if device == "cpu":
        return _open(graph, options, "CPUExecutionProvider", {})
    if GPU not in onnxruntime.get_available_providers():
        raise EngineError("the onnxruntime package here has no CUDA; pip install 'trt-spec[cuda]' instead of [cpu]")
    settings = {
        "device_id": str(torch.device(device).index or 0),
        "user_compute_stream": str(torch.cuda.current_stream(device).cuda_stream),
        "use_tf32": "0",
    }
    try:
        # With CUDA graphs it refuses a graph if anything but shapes would be computed on the CPU.
        return _open(graph, options, GPU, settings | {"enable_cuda_graph": "1"})
    except EngineError as error:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        try:
            elsewhere = nodes_elsewhere(_open(graph, options, GPU, settings), GPU)
        except EngineError:
            raise error from None  # the graph cannot be opened even without CUDA graphs
        raise EngineError(f"{error}; nodes not on the GPU: {', '.join(elsewhere) or 'none'}") from error


def _open(graph: Path, options: Any, provider: str, settings: dict[str, str]) -> Any:
    import onnxruntime

    try:
        session = onnxruntime.InferenceSession(str(graph), options, providers=[(provider, settings)], enable_fallback=0)
    except Exception as error:  # the bindings raise a dozen unrelated types
        raise EngineError(f"ONNX Runtime cannot open {graph}: {first_line(error)}") from error
    if provider not in session.get_providers():
        raise EngineError(f"ONNX Runtime cannot load {provider}; see its warnings for the missing library")
    return session


def nodes_elsewhere(session: Any, provider: str) -> list[str]:
    """List operator and name of each node that another provider computes, except shapes, which belong on the CPU."""
    return [
        f"{node.op_type} {node.name!r}"
        for subgraph in session.get_provider_graph_assignment_info()
        if subgraph.ep_name != provider
        for node in subgraph.get_nodes()
        if node.op_type != "Shape"
    ]


def _interface(session: Any) -> tuple[Any, Any]:
    return session.get_inputs(), session.get_outputs()


def _specs(tensors: Any) -> list[TensorSpec]:
    names = {"float": "float32", "double": "float64"}
    return [
        TensorSpec(tensor.name, names.get(dtype := tensor.type[7:-1], dtype), tuple(tensor.shape)) for tensor in tensors
    ]
