"""Engines run a bundle's graphs. Bundle, contract and errors live here as well, since export and runtime share them."""

from .bundle import Bundle, ModelEntry, TokenizerEntry
from .contract import (
    ALIGNMENT,
    BLOCK_TOKENS,
    CAPABILITIES,
    GRANULE,
    MAX_DRAFT_LENGTH,
    PREFILL_WIDTH,
    SLACK,
    SPARE_BLOCK,
    WIDEST_STEP,
    Capability,
    Contract,
    TensorSpec,
)
from .cores import usable_cores
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
from .steps import blank_cache, blank_step, cache_rows, last_rows, line, make_step
from .table import ENGINES, EngineKind, engines_of, open_engine, open_engines, together

__all__ = [
    "ALIGNMENT",
    "BLOCK_TOKENS",
    "CAPABILITIES",
    "ENGINES",
    "GRANULE",
    "MAX_DRAFT_LENGTH",
    "PREFILL_WIDTH",
    "SLACK",
    "SPARE_BLOCK",
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
    "cache_rows",
    "engines_of",
    "last_rows",
    "line",
    "make_step",
    "open_engine",
    "open_engines",
    "together",
    "usable_cores",
]
