"""A graph's interface, which export writes, the bundle stores and every engine checks before the first run."""

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
from .states import CALL, FEATURES, ROW, SOURCE, STATE_KINDS, TOKEN, Dim, State, StateKind, keys_and_values

__all__ = [
    "ALIGNMENT",
    "BLOCK_TOKENS",
    "CALL",
    "CAPABILITIES",
    "FEATURES",
    "GRANULE",
    "MAX_DRAFT_LENGTH",
    "PREFILL_WIDTH",
    "ROW",
    "SLACK",
    "SOURCE",
    "SPARE_BLOCK",
    "STATE_KINDS",
    "TOKEN",
    "WIDEST_STEP",
    "Capability",
    "Contract",
    "Dim",
    "State",
    "StateKind",
    "TensorSpec",
    "keys_and_values",
]
