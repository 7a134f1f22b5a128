"""ONNX Runtime on the CPU: one session per graph, every tensor bound to torch memory, the cache in place."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .contract import Contract, TensorSpec
from .engine import Step
from .errors import EngineError

MOST_STEPS = 64  # prefill chunks come in every width
NUMPY_TYPES = {torch.float32: np.float32, torch.int64: np.int64}


class OnnxRuntimeEngine:
    """See `Engine`. The cache may be any length: binding another one costs microseconds."""

    static_capacity = False

    def __init__(self, graph: Path, contract: Contract, device: str) -> None:
        if device != "cpu":
            raise EngineError(f"engine onnxruntime runs on the device cpu, not on {device!r}")
        if contract.dtype != "float32":
            raise EngineError(
                f"{graph} is {contract.dtype}, for which ONNX Runtime has no CPU kernels; export with --dtype float32"
            )
        self.contract, self.device = contract, device
        self._session: Any = open_session(graph)
        contract.check(str(graph), *(_specs(tensors) for tensors in _interface(self._session)))
        self._cache: Mapping[str, Tensor] = {}
        self._steps: dict[tuple[int, int, int, int], Step] = {}

    def bind(self, cache: Mapping[str, Tensor]) -> None:
        self._cache = cache
        self._steps.clear()

    def step(self, first_row: int, batch: int, width: int, rows: int) -> Step:
        key = (first_row, batch, width, rows)
        if key not in self._steps:
            if len(self._steps) == MOST_STEPS:
                del self._steps[next(iter(self._steps))]
            self._steps[key] = self._bound_step(*key)
        return self._steps[key]

    def _bound_step(self, first_row: int, batch: int, width: int, rows: int) -> Step:
        last_rows = torch.arange(width - rows, width).expand(batch, rows).contiguous()
        inputs = {
            "input_ids": torch.zeros(batch, width, dtype=torch.int64),
            "start": torch.zeros(batch, dtype=torch.int64),
            "logit_rows": last_rows,
        }
        logits = torch.zeros(batch, rows, self.contract.vocab_size)
        session, binding = self._session, self._session.io_binding()
        views = {name: buffer[first_row : first_row + batch] for name, buffer in self._cache.items()}
        for name, tensor in (inputs | {f"past_{name}": view for name, view in views.items()}).items():
            binding.bind_input(name, "cpu", 0, NUMPY_TYPES[tensor.dtype], list(tensor.shape), tensor.data_ptr())
        for name, tensor in ({"logits": logits} | {f"present_{name}": view for name, view in views.items()}).items():
            binding.bind_output(name, "cpu", 0, NUMPY_TYPES[tensor.dtype], list(tensor.shape), tensor.data_ptr())

        def run() -> None:
            try:
                session.run_with_iobinding(binding)
            except Exception as error:  # the bindings raise a dozen unrelated types
                raise EngineError(
                    f"ONNX Runtime failed at batch {batch}, width {width}: {_first_line(error)}"
                ) from error

        return Step(**inputs, logits=logits, run=run)

    def close(self) -> None:
        self._steps.clear()
        self._cache = {}
        self._session = None


def open_session(graph: Path) -> Any:
    """An inference session whose threads stop spinning when a run ends.

    Two sessions take turns in a round: a worker of one that spins on while the other runs would double the other's
    time on a small machine.
    """
    try:
        import onnxruntime
    except ImportError as error:
        raise EngineError("engine onnxruntime needs the onnxruntime package; pip install 'trt-spec[cpu]'") from error
    options = onnxruntime.SessionOptions()
    # The library's default counts the machine's cores, not those this process may use.
    options.intra_op_num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    options.add_session_config_entry("session.force_spinning_stop", "1")
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
