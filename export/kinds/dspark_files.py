"""Reads DSpark heads: those of DFlash with `markov_head.…` and `confidence_head.…`.

its authors      all fields lie in config.json itself; the head has copies of the target's embedding and projection
speculators      the fields of its layers lie in `transformer_layer_config`
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from ...engines import Contract, ExportError
from ..checking.quality import Sample
from .dflash import DFlash
from .dflash_files import OWN_FIELDS, DFlashKind
from .dspark import DSpark
from .heads import HeadCheckpoint, LoadedHead


class DSparkKind(DFlashKind):
    name = "dspark"
    own_fields: ClassVar[set[str]] = OWN_FIELDS | {
        "confidence_head_with_markov", "enable_confidence_head", "markov_head_type", "markov_rank", "num_anchors",
    }  # fmt: skip
    from_anchor: ClassVar[bool] = True

    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        named = str([fields.get("speculators_model_type"), fields.get("architectures")]).lower()
        return "dspark" in named  # its authors name the family of its layers, too

    def made(self, name: str, fields: Mapping[str, Any], parts: tuple[Any, ...]) -> DFlash:
        kind, rank = fields.get("markov_head_type", "vanilla"), fields.get("markov_rank", 256)
        if kind != "vanilla":
            raise ExportError(
                f"head {name} has the markov_head_type {kind!r}, expected 'vanilla', which reads the token before and "
                "nothing else; this version cannot run others"
            )
        if type(rank) is not int or rank < 1:
            raise ExportError(
                f"head {name} has the markov_rank {rank!r}, expected 1 or more; without a Markov head it is a DFlash "
                "head, name it so in its config.json"
            )
        reads = parts[0].hidden_size + rank * bool(fields.get("confidence_head_with_markov", True))
        return DSpark(*parts, rank=rank, confidence=reads * bool(fields.get("enable_confidence_head", True)))

    def load(self, checkpoint: HeadCheckpoint, target: Any, contract: Contract, sample: Sample) -> LoadedHead:
        found = super().load(checkpoint, target, contract, sample)
        return replace(found, tables=found.module.tables())
