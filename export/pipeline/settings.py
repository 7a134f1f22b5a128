"""What an export is asked for beside its checkpoints, and what goes with what."""

from dataclasses import dataclass, replace
from importlib.util import find_spec

from ...engines import ExportError
from ...engines.bundle import TARGET
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.narrow_caches import CACHES
from ..passes.quantise import AUTO, Quantisation

DTYPES = ("float32", "float16", "bfloat16")
BLOCKS_OF = {  # by how most of a file is stored
    **{f"GGUF, {kind}": "int4" for kind in ("Q4_0", "Q4_1", "Q4_K")},
    **{f"GGUF, {kind}": "int8" for kind in ("Q8_0", "Q6_K")},
}


@dataclass(frozen=True)
class Settings:
    """How models are stored, what the target has room for, and whether all of it is checked."""

    dtype: str
    weights: Quantisation  # of the target
    draft_weights: Quantisation
    cache: str
    check: bool
    images: bool  # that the target sees
    adapters: int  # that requests may bring for the target,
    adapter_rank: int  # each of so many columns at most
    shards: int  # of the target
    exact_sums: bool  # between them

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ExportError(f"dtype is {self.dtype!r}, expected {', '.join(DTYPES)}")
        if self.cache not in CACHES:
            raise ExportError(f"cache is {self.cache!r}, expected {', '.join(CACHES)}")
        for name, least in (("shards", 1), ("adapters", 0), ("adapter_rank", 1)):
            if (number := getattr(self, name)) < least:
                raise ExportError(f"{name} is {number}, expected {least} or more")
        if self.check and find_spec("onnxruntime") is None:
            raise ExportError(
                "the check needs ONNX Runtime, which is not installed; pip install 'trt-spec[cpu]' or export unchecked"
            )

    @property
    def splits(self) -> bool:
        """Whether the target's graph gets sums between shards, or those of one in float64."""
        return self.shards > 1 or self.exact_sums

    def stored(self, role: str) -> Quantisation:
        return self.weights if role == TARGET else self.draft_weights

    def settled(self, role: str, checkpoint: Checkpoint) -> Quantisation:
        """Settle what `auto` means for a checkpoint: what a GGUF file holds is kept, others stay as they are."""
        weights = self.stored(role)
        if weights.kind != AUTO:
            return weights
        found = BLOCKS_OF.get(checkpoint.stored_as) if self.dtype == "float32" and checkpoint.lora is None else None
        return weights.unless_stored() if found is None else replace(weights, kind=found, as_stored=True)
