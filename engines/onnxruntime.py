"""ONNX Runtime on the CPU: one session per graph, every tensor bound to torch memory, the cache in place."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .bundle import WEIGHTS
from .contract import Contract, TensorSpec
from .engine import Step
from .errors import EngineError

NUMPY_TYPES = {torch.float32: np.float32, torch.int64: np.int64}
SMALL_BYTES = 8 * 2**20  # weights that one thread reads as fast as many can be woken to


@dataclass(frozen=True)
class Threads:
    """How many threads a session has, and whether they stay awake for a while after a run."""

    count: int
    stay_awake: bool


class OnnxRuntimeEngine:
    """See `Engine`. The cache may be any length: binding another one costs microseconds."""

    static_capacity = False

    def __init__(self, graph: Path, contract: Contract, device: str, threads: Threads, exact_weights: bool) -> None:
        if device != "cpu":
            raise EngineError(f"engine onnxruntime runs on the device cpu, not on {device!r}")
        if contract.dtype != "float32":
            raise EngineError(
                f"{graph} is {contract.dtype}, for which ONNX Runtime has no CPU kernels; export with --dtype float32"
            )
        self.contract, self.device = contract, device
        self._session: Any = open_session(graph, threads, exact_weights)
        contract.check(str(graph), *(_specs(tensors) for tensors in _interface(self._session)))
        self._cache: Mapping[str, Tensor] = {}

    def bind(self, cache: Mapping[str, Tensor]) -> None:
        self._cache = cache

    def step(self, first_row: int, input_ids: Tensor, start: Tensor, logits: Tensor) -> Step:
        (batch, width), rows = input_ids.shape, logits.shape[1]
        last_rows = torch.arange(width - rows, width).expand(batch, rows).contiguous()
        inputs = {"input_ids": input_ids, "start": start, "logit_rows": last_rows}
        session, binding = self._session, self._session.io_binding()
        views = {name: buffer[first_row : first_row + batch] for name, buffer in self._cache.items()}
        inputs |= {f"past_{name}": view for name, view in views.items()}
        outputs = {"logits": logits} | {f"present_{name}": view for name, view in views.items()}
        for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, tensor in tensors.items():
                assert tensor.is_contiguous(), f"{name} must be contiguous"
                bind(name, "cpu", 0, NUMPY_TYPES[tensor.dtype], list(tensor.shape), tensor.data_ptr())

        def run(tensors: object = (inputs, outputs)) -> None:  # it keeps their memory alive
            try:
                session.run_with_iobinding(binding)
            except Exception as error:  # the bindings raise a dozen unrelated types
                raise EngineError(
                    f"ONNX Runtime failed at batch {batch}, width {width}: {_first_line(error)}"
                ) from error

        return Step(input_ids, start, logits, run)

    def close(self) -> None:
        self._cache = {}
        self._session = None


def share_threads(graphs: Sequence[Path]) -> list[Threads]:
    """Divide the machine among models that take turns in a round.

    A worker of one model that spins on while another runs doubles the other's time on a small machine; one that sleeps
    must be woken, which costs each run what a small model takes altogether. So a small model has one thread, a single
    large one beside it keeps its workers awake, and several large ones send theirs to sleep when a run ends.
    """
    small = [_weight_bytes(graph) <= SMALL_BYTES for graph in graphs]
    alone = small.count(False) == 1
    # The library's default counts the machine's cores, not those this process may use.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return [Threads(1, stay_awake=False) if is_small else Threads(cores, stay_awake=alone) for is_small in small]


def _weight_bytes(graph: Path) -> int:
    return sum(file.stat().st_size for file in (graph, graph.with_name(WEIGHTS)) if file.exists())


def open_session(graph: Path, threads: Threads, exact_weights: bool = False) -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineError("engine onnxruntime needs the onnxruntime package; pip install 'trt-spec[cpu]'") from error
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads.count
    # Planned per set of shapes, which change as the cache grows: no faster here, and each plan keeps its memory.
    options.enable_mem_pattern = False
    if not threads.stay_awake:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    # How MatMulNBits computes, to which the engine fuses quantised matrices: 4 is int8, 0 the type of the input.
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "0" if exact_weights else "4")
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the bindings raise a dozen unrelated types
        raise EngineError(f"ONNX Runtime cannot open {graph}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _interface(session: Any) -> tuple[Any, Any]:
    return session.get_inputs(), session.get_outputs()


def _specs(tensors: Any) -> list[TensorSpec]:
    names = {"float": "float32", "double": "float64"}
    return [
        TensorSpec(tensor.name, names.get(dtype := tensor.type[7:-1], dtype), tuple(tensor.shape)) for tensor in tensors
    ]
