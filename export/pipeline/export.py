"""A bundle that is being written, and what its models have said so far."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...engines import ExportError, ModelEntry
from ...engines.bundle import FOREIGN, TARGET, WEIGHTS
from ..checking.quality import LOGITS, LONGEST, Sample, overlap
from ..checkpoints.agreement import Agreed
from ..checkpoints.narrow_caches import FULL
from ..kinds import Joining, LoadedHead
from ..writing.report import ModelReport
from ..writing.seeing_drafts import SeeingTarget
from .settings import Settings

Progress = Callable[[str], None]
SAMPLE = Path(__file__).parents[1] / "sample.txt"
TEMPERATURES = (0.0, 1.0)


@dataclass
class Export:
    """What is written, and what later steps read of earlier ones."""

    folder: Path
    settings: Settings
    agreed: Agreed
    joining: Joining
    progress: Progress
    given_text: str | None  # in place of the sample
    notes: list[str]
    models: list[ModelReport] = field(default_factory=list)
    heads: dict[str, LoadedHead] = field(default_factory=dict)  # that are joined to the target, by kind
    seeing: SeeingTarget | None = None
    logits: dict[str, Tensor] = field(default_factory=dict)  # of the sample, by model
    text: list[int] | None = None  # the target's sample, if it is checked
    read: Mapping[str, Tensor] = field(default_factory=dict)  # what each head reads of it [L, hidden]
    running: Sample | None = field(init=False, default=None)  # the text in its tokens, if something is measured on it

    def __post_init__(self) -> None:
        if self.settings.check or self.joining.names or self.settings.cache != FULL:
            self.running = self._sample(TARGET)

    @cached_property
    def vocab_size(self) -> int:
        return self.agreed.vocabularies[TARGET].entry().vocab_size

    def running_of(self, role: str) -> Sample | None:
        """The text in a model's own tokens."""
        return self._sample(role) if role == FOREIGN and self.running else self.running

    def checked(self, text: Sample) -> Sample:
        """As much of a text as a model is checked on."""
        return text.first(min(LONGEST, self.agreed.length, max(2, LOGITS // self.vocab_size)))

    def _sample(self, role: str) -> Sample:
        own = self.agreed.vocabularies[role]
        text = SAMPLE.read_text(encoding="utf-8") if self.given_text is None else self.given_text
        tokenizer: Any = own.tokenizer
        tokens: list[int] = tokenizer.encode(text).ids
        if len(tokens) < 2:
            raise ExportError(f"the text has {len(tokens)} tokens, expected at least 2 to measure the models on")
        return Sample(tokens, own.entry().vocab_size)

    def report(
        self, role: str, entry: ModelEntry, nodes: int, fired: dict[str, int], begun: float, checkpoint_bytes: int = 0
    ) -> None:
        size, seconds = (self.folder / role / WEIGHTS).stat().st_size, time.perf_counter() - begun
        self.models.append(ModelReport(role, entry, nodes, fired, size, seconds, checkpoint_bytes))

    def overlaps(self) -> dict[str, dict[float, float]]:
        """Return the overlap of target and drafts on the sample, by draft and temperature."""
        drafts = {role: one[:, : self.vocab_size] for role, one in self.logits.items() if role not in (TARGET, FOREIGN)}
        target = self.logits[TARGET][:, : self.vocab_size] if drafts else torch.zeros(0)
        return {role: {t: overlap(target[-len(one) :], one, t) for t in TEMPERATURES} for role, one in drafts.items()}
