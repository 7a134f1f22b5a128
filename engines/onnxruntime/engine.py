"""ONNX Runtime on the CPU or a GPU: one session per graph, all tensors in torch memory, the cache written in place."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..bundle import ADAPTED, FUSED, GRAPH
from ..contract import ADAPTER, FP8, AnyContract, Contract, TensorSpec, in_words
from ..engine import Engine, Step
from ..errors import EngineError, first_line
from ..onnx_types import DTYPES
from .session import UnknownOperators, flushes_denormals, open_session
from .threads import Threads, share_threads

ONNX_TYPES = {dtype: number for number, dtype in DTYPES.items()}
WARM_UP = 2  # runs of a step before it becomes a CUDA graph


def open_engines(
    name: str, models: Sequence[tuple[Path, AnyContract]], device: str, exact_weights: bool, alone: bool
) -> "list[OnnxRuntimeEngine]":
    shares = share_threads([graph for graph, _ in models], alone)
    return [
        OnnxRuntimeEngine(*model, device, threads, exact_weights) for model, threads in zip(models, shares, strict=True)
    ]


class OnnxRuntimeEngine(Engine):
    """A session of ONNX Runtime. On the CPU its cache may have any length: binding another one costs microseconds.

    On a GPU it runs on the stream that was torch's current one when it was opened. Steps that repeat run as CUDA graphs
    of their own, and the caller cannot capture them in another graph.
    """

    def __init__(self, graph: Path, contract: AnyContract, device: str, threads: Threads, exact_weights: bool) -> None:
        self.contract, self.device = cast("Contract", contract), device
        if device != "cpu" and device.partition(":")[0] != "cuda":
            raise EngineError(f"engine onnxruntime runs on the device cpu or cuda, not on {device!r}; name one of them")
        self.static_capacity = self._on_gpu = device != "cpu"
        self.own_threads = self.reads_together = not self._on_gpu  # on a GPU other kernels read several rows
        if contract.dtype != "float32" and not self._on_gpu:
            raise EngineError(
                f"{graph} is {contract.dtype}, for which ONNX Runtime has no CPU kernels; export with --dtype float32"
            )
        if contract.rounded_to == FP8 and not self._on_gpu:
            raise EngineError(
                f"{graph} keeps keys and values in {FP8}, which ONNX Runtime has no CPU kernels to write; use engine "
                "torch, or export with --cache int8"
            )
        self._open = partial(open_session, exact_weights=exact_weights, device=device)
        self._threads = threads
        fused = graph.with_name(FUSED)
        self._session: Any = None
        if not self._on_gpu and graph.name == GRAPH and fused.exists():
            with suppress(UnknownOperators):  # an older library runs the graph of all engines
                self._session = self._open(fused, threads)
                graph = fused
        self._session = self._session or self._open(graph, threads)
        self._adapted: Any = None  # opened for the first step whose rows have adapters
        self.graph = graph  # that it runs
        contract.without_adapters.check(str(graph), *_interface(self._session))
        self._graph_ids = itertools.count(1)

    def step(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Tensor]) -> Step:
        contract, session = self.contract.without_adapters, self._session
        if ADAPTER in inputs:
            contract, session = self.contract, self._with_adapters()
        sizes, binding = contract.sizes({**inputs, **outputs}), session.io_binding()
        kind, number = torch.device(self.device).type, torch.device(self.device).index or 0
        for bind, tensors in ((binding.bind_input, inputs), (binding.bind_output, outputs)):
            for name, tensor in tensors.items():
                assert tensor.is_contiguous(), f"{name} must be contiguous"
                bind(name, kind, number, ONNX_TYPES[tensor.dtype], list(tensor.shape), tensor.data_ptr())
        settings = self._run_settings() if self._on_gpu else itertools.repeat(None)
        wait = self._on_gpu and not torch.cuda.current_stream(self.device).cuda_stream
        flushes = flushes_denormals()

        def run(tensors: object = (inputs, outputs)) -> None:  # the default keeps their memory alive
            if wait:  # if torch is on the default stream, the session has a stream of its own
                torch.cuda.synchronize(self.device)
            try:
                torch.set_flush_denormal(not self._on_gpu)  # as the session's own threads do
                session.run_with_iobinding(binding, next(settings))
            except Exception as error:  # the bindings raise a dozen unrelated types
                raise EngineError(f"ONNX Runtime failed at {in_words(sizes)}: {first_line(error)}") from error
            finally:
                torch.set_flush_denormal(flushes)
            if wait:
                torch.cuda.synchronize(self.device)

        return Step(inputs, outputs, run)

    def _run_settings(self) -> Iterator[Any]:
        """Yield the settings of each run. Most steps of a prompt run once and are not worth a graph."""
        yield from itertools.repeat(_on_gpu(-1), WARM_UP)
        yield from itertools.repeat(_on_gpu(next(self._graph_ids)))

    def _with_adapters(self) -> Any:
        """Return the session of the graph that has room for adapters."""
        if self._adapted is None:
            graph = self.graph.with_name(ADAPTED + self.graph.name)
            # Its workers would spin while the other session runs.
            self._adapted = self._open(graph, replace(self._threads, stay_awake=False))
            self.contract.check(str(graph), *_interface(self._adapted))
        return self._adapted

    def open_adapters(self) -> None:
        self._with_adapters()

    def close(self) -> None:
        self._session = self._adapted = None


def _on_gpu(graph_id: int) -> Any:
    """Make the settings to run as this CUDA graph, -1 for none, without waiting for the end."""
    import onnxruntime

    settings = onnxruntime.RunOptions()
    settings.add_run_config_entry("disable_synchronize_execution_providers", "1")
    settings.add_run_config_entry("gpu_graph_id", str(graph_id))
    return settings


def _interface(session: Any) -> tuple[list[TensorSpec], list[TensorSpec]]:
    return _specs(session.get_inputs()), _specs(session.get_outputs())


def _specs(tensors: Any) -> list[TensorSpec]:
    names = {"float": "float32", "double": "float64"}
    return [
        TensorSpec(tensor.name, names.get(dtype := tensor.type[7:-1], dtype), tuple(tensor.shape)) for tensor in tensors
    ]
