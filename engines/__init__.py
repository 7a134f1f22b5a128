"""Engines run a bundle's graphs; this package also holds what export and runtime share: bundle, contract, errors."""

from pathlib import Path

from .bundle import Bundle, ModelEntry, TokenizerEntry
from .contract import MAX_DRAFT_LENGTH, Contract, TensorSpec
from .engine import Engine, Step
from .errors import (
    BundleError,
    ContractError,
    EngineError,
    ExportError,
    PairError,
    RequestError,
    TrtSpecError,
)


def open_engine(name: str, graph: Path, contract: Contract, device: str = "cpu") -> Engine:
    """Open a graph in the engine of this name; heavy libraries are imported only here."""
    if name == "onnxruntime":
        from .onnxruntime import OnnxRuntimeEngine

        return OnnxRuntimeEngine(graph, contract, device)
    raise EngineError(f"there is no engine {name!r}; this version has: onnxruntime")


__all__ = [
    "MAX_DRAFT_LENGTH",
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
    "open_engine",
]
