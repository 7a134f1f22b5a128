"""Engines run a bundle's graphs; this package also holds what export and runtime share: bundle, contract, errors."""

from collections.abc import Sequence
from pathlib import Path

from .bundle import Bundle, ModelEntry, TokenizerEntry
from .contract import ALIGNMENT, GRANULE, MAX_DRAFT_LENGTH, PREFILL_WIDTH, SLACK, Contract, TensorSpec
from .engine import Engine, Step, blank_step
from .errors import (
    BundleError,
    ContractError,
    EngineError,
    ExportError,
    PairError,
    RequestError,
    TrtSpecError,
)

ENGINES = ("onnxruntime", "tensorrt", "torch", "torch-compiled")


def open_engine(
    name: str, graph: Path, contract: Contract, device: str = "cpu", *, exact_weights: bool = False
) -> Engine:
    """Open one graph in the engine of this name."""
    return open_engines(name, [(graph, contract)], device, exact_weights=exact_weights)[0]


def open_engines(
    name: str, models: Sequence[tuple[Path, Contract]], device: str = "cpu", *, exact_weights: bool = False
) -> list[Engine]:
    """Open graphs that take turns on one device; heavy libraries are imported only here.

    With `exact_weights` quantised matrices are multiplied as the numbers they stand for, ten times slower; without,
    an engine may round the other factor to int8 as well.
    """
    if name == "onnxruntime":
        from .onnxruntime import OnnxRuntimeEngine, share_threads

        shares = share_threads([graph for graph, _ in models])
        return [
            OnnxRuntimeEngine(*model, device, threads, exact_weights)
            for model, threads in zip(models, shares, strict=True)
        ]
    if name == "tensorrt":
        from .tensorrt import open_plans

        return list(open_plans(models, device))
    if name in ("torch", "torch-compiled"):
        from .torch_engine import TorchEngine

        return [TorchEngine(*model, device, compiled=name == "torch-compiled") for model in models]
    raise EngineError(f"there is no engine {name!r}; this version has: {', '.join(ENGINES)}")


__all__ = [
    "ALIGNMENT",
    "ENGINES",
    "GRANULE",
    "MAX_DRAFT_LENGTH",
    "PREFILL_WIDTH",
    "SLACK",
    "Bundle",
    "BundleError",
    "Contract",
    "ContractError",
    "Engine",
    "EngineError",
    "ExportError",
    "ModelEntry",
    "PairError",
    "RequestError",
    "Step",
    "TensorSpec",
    "TokenizerEntry",
    "TrtSpecError",
    "blank_step",
    "open_engine",
    "open_engines",
]
