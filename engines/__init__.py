"""Engines run a bundle's graphs; this package also holds what export and runtime share: bundle, contract, errors."""

from .bundle import Bundle, ModelEntry, TokenizerEntry
from .contract import (
    ALIGNMENT,
    CAPABILITIES,
    GRANULE,
    MAX_DRAFT_LENGTH,
    PREFILL_WIDTH,
    SLACK,
    WIDEST_STEP,
    Capability,
    Contract,
    TensorSpec,
)
from .engine import Engine, Step, blank_cache, blank_step, last_rows, make_step
from .errors import (
    BundleError,
    ContractError,
    EngineError,
    ExportError,
    PairError,
    RequestError,
    TrtSpecError,
)
from .table import ENGINES, EngineKind, open_engine, open_engines

__all__ = [
    "ALIGNMENT",
    "CAPABILITIES",
    "ENGINES",
    "GRANULE",
    "MAX_DRAFT_LENGTH",
    "PREFILL_WIDTH",
    "SLACK",
    "WIDEST_STEP",
    "Bundle",
    "BundleError",
    "Capability",
    "Contract",
    "ContractError",
    "Engine",
    "EngineError",
    "EngineKind",
    "ExportError",
    "ModelEntry",
    "PairError",
    "RequestError",
    "Step",
    "TensorSpec",
    "TokenizerEntry",
    "TrtSpecError",
    "blank_cache",
    "blank_step",
    "last_rows",
    "make_step",
    "open_engine",
    "open_engines",
]
