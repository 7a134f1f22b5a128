"""What a bundle holds, as its manifest says it: its models, by name and by what they are for."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..contract import CALL, GRANULE, SLACK
from .entries import EncoderEntry, ModelEntry, TokenizerEntry, VisionEntry
from .layout import DRAFT, FOREIGN, GRAPH, HEAD, TARGET, TOKENIZER, VISION, WEIGHTS


@dataclass(frozen=True)
class Contents:
    """What lies in the folder of a bundle."""

    path: Path
    models: dict[str, ModelEntry]  # by name, which is also the name of the model's folder
    tokenizer: TokenizerEntry
    made_by: dict[str, str]  # library name to version
    files: dict[str, dict[str, Any]]  # relative path to {"bytes", "sha256"}
    longest: int | None = None  # fewer tokens than the models allow, if that was asked for
    encoders: dict[str, EncoderEntry] = field(default_factory=dict)  # by name, which is also that of the folder
    vision: VisionEntry | None = None  # if the target sees

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the target, of all drafts and of all heads, in this order."""
        return (next(name for name, model in self.models.items() if model.kind == TARGET), *self.drafts, *self.heads)

    @property
    def target(self) -> ModelEntry:
        return self.models[self.names[0]]

    @property
    def drafts(self) -> tuple[str, ...]:
        """The names of all drafts, in the order in which drafters are named after them."""
        return tuple(name for name, model in self.models.items() if model.kind == DRAFT)

    @property
    def heads(self) -> tuple[str, ...]:
        """The names of all drafts that read states of the target, each that of the drafter that runs it."""
        return tuple(name for name, model in self.models.items() if model.kind == HEAD)

    @property
    def foreign(self) -> str | None:
        """The name of the draft that has tokens of its own, if there is one."""
        return next((name for name, model in self.models.items() if model.kind == FOREIGN), None)

    def vocab_size(self, name: str) -> int:
        """Return how many tokens a model has; its logits beyond are padding."""
        own = self.models[name].tokens
        return self.tokenizer.vocab_size if own is None else own.vocab_size

    def features(self, head: str) -> slice:
        """Return which of the target's features a head reads: they lie side by side, in the order of the heads."""
        sizes = {name: self.models[name].contract.of_kind(CALL)[0].shape[0] for name in self.heads}
        begin = sum(size for name, size in sizes.items() if self.heads.index(name) < self.heads.index(head))
        return slice(begin, begin + sizes[head])

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of all graphs: of models, of encoders, and of the one that sees."""
        return (*self.models, *self.encoders, *([] if self.vision is None else [VISION]))

    @property
    def encoder(self) -> EncoderEntry | None:
        """The encoder that the target reads, if its texts have sources."""
        return next((one for one in self.encoders.values() if self.names[0] in one.contract.feeds), None)

    def longest_source(self, name: str) -> int:
        """Return how many entries of a source this model can have, 0 if it reads none."""
        return max((one.contract.longest for one in self.encoders.values() if name in one.contract.feeds), default=0)

    @property
    def draft(self) -> ModelEntry | None:
        """The first draft."""
        return self.models[self.drafts[0]] if self.drafts else None

    def graph(self, name: str) -> Path:
        return self.path / name / GRAPH

    def weight_bytes(self, name: str) -> int:
        return int(self.files[f"{name}/{WEIGHTS}"]["bytes"])

    @property
    def tokenizer_file(self) -> Path:
        return self.path / TOKENIZER

    @property
    def max_length(self) -> int:
        return self.longest or self._positions

    @property
    def _positions(self) -> int:
        return min(model.contract.max_length for model in self.models.values() if model.tokens is None)

    @property
    def capacity(self) -> int:
        """Entries of a cache that holds the longest sequence and what a call may write past it."""
        return _with_slack(self._positions)

    def capacity_of(self, name: str) -> int:
        """Entries of that of one model: a draft with tokens of its own may need more than the others."""
        model = self.models[name]
        return self.capacity if model.tokens is None else _with_slack(model.contract.max_length)


def _with_slack(length: int) -> int:
    return -(-(length + SLACK) // GRANULE) * GRANULE
