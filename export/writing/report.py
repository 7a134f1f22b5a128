"""Report what an export has written."""

from dataclasses import dataclass
from pathlib import Path

from ...engines import EncoderEntry, ModelEntry, VisionEntry


@dataclass(frozen=True)
class ModelReport:
    """One exported model: what was written, how it was checked, how long it took."""

    role: str
    entry: ModelEntry
    nodes: int
    fired: dict[str, int]  # how often each rewrite fired
    weight_bytes: int
    seconds: float
    checkpoint_bytes: int = 0  # of the files that held its weights


@dataclass(frozen=True)
class EncoderReport:
    """One exported encoder."""

    role: str
    entry: EncoderEntry
    nodes: int
    weight_bytes: int
    seconds: float


@dataclass(frozen=True)
class VisionReport:
    """The exported graph that sees for the target."""

    entry: VisionEntry
    nodes: int
    weight_bytes: int
    seconds: float


@dataclass(frozen=True)
class ExportReport:
    """The files an export has written, and its measurements of target and drafts."""

    path: Path
    max_length: int
    models: list[ModelReport]
    notes: list[str]
    overlap: dict[str, dict[float, float]]  # α on running text by draft and temperature, if they were checked
    seconds: float
    encoders: list[EncoderReport]
    vision: VisionReport | None = None
