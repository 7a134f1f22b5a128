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
    Dim,
    TensorSpec,
)

__all__ = [
    "ALIGNMENT",
    "BLOCK_TOKENS",
    "CAPABILITIES",
    "GRANULE",
    "MAX_DRAFT_LENGTH",
    "PREFILL_WIDTH",
    "SLACK",
    "SPARE_BLOCK",
    "WIDEST_STEP",
    "Capability",
    "Contract",
    "Dim",
    "TensorSpec",
]
