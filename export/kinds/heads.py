"""What all kinds of heads share: drafts that read what a target makes of its tokens.

A kind reads its checkpoints and says which ways there are to wire a head. The head itself, in torch, is traced, says
what it proposes, and is what its graph is compared with.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel

from ...engines import Contract, Engine, Masks
from ..checking.check import Errors
from ..checking.quality import Sample
from ..tracing.hidden_states import Features
from .files import HeadFiles, refuse_unknown
from .overlap import measured

WEAK = 0.2  # an overlap below which a head is probably wired wrong

# Calls a graph, compares what it says with the head where errors are to be noted, and returns the graph's logits
# [L - 1, V] of the place after the next one, after each token but the last.
Compare = Callable[[Engine, Errors | None], Tensor]
# Wires a head in one of the ways that there are, and returns what it then reads of its target.
Wire = Callable[[], Features]


class Head(PreTrainedModel, ABC):  # type: ignore[misc]
    """A head in torch, over the target's vocabulary."""

    reads_embeddings: ClassVar[bool] = False  # those of the text's tokens, and so of images in it

    @property
    @abstractmethod
    def measured_places(self) -> int:
        """The places after a token at which its overlap is measured."""

    @property
    def masks(self) -> Masks | None:
        """The masks that it reads, if it proposes in one pass from some."""
        return None

    @abstractmethod
    def contract(self, name: str, target: Contract) -> Contract:
        """Return the contract of its graph beside a target."""

    @abstractmethod
    def traced(self) -> nn.Module:
        """Return what is traced of it."""

    @abstractmethod
    def says(self, window: Tensor, features: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """Say what it proposes over a window [L] with these features [L, hidden].

        For each place of it, give the tokens [N] after which the target says the same, and its own logits [N, V].
        """

    @abstractmethod
    def expected(self, tokens: Tensor, features: Tensor) -> tuple[float, Compare]:
        """Compute what its graph must say of tokens [L] with these features [L, hidden], and how large logits are."""

    def tables(self) -> dict[str, Tensor]:
        """Return what a round reads of it beside its graph."""
        return {}


@dataclass(frozen=True)
class HeadCheckpoint(HeadFiles):
    """A head that can be exported as a model of its own."""

    kind: "HeadKind"


@dataclass(frozen=True)
class LoadedHead:
    """A head beside its target, wired as it works best."""

    label: str
    module: Head
    features: Features  # what it reads of the target
    contract: Contract  # of its graph
    notes: list[str]  # how it was wired, for its user
    readings: dict[str, list[float]]  # overlap by place, of each way to wire it

    def beside(self, name: str, bigram: float | None) -> "LoadedHead":
        """Return the head with a note if it overlaps no more with its target than a counted bigram."""
        found = max(self.readings.values(), key=sum)[0]
        if bigram is None or found > bigram:
            return self
        note = (
            f"{name} is no better than a bigram counted on three quarters of the text, which overlaps with the target "
            f"by {bigram:.3f}, and the head by {found:.3f}; train it longer, or use drafter ngram, which runs no model"
        )
        return replace(self, notes=[*self.notes, note])


class HeadKind(ABC):
    """A kind of heads; a bundle's model and the drafter that runs it have its name."""

    name: ClassVar[str]
    known: ClassVar[Mapping[str, set[str]]] = {}  # fields of config.json (""), and of each object in it

    @abstractmethod
    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Say whether a checkpoint is of this kind; without `shapes` its weights are no safetensors."""

    @abstractmethod
    def read(self, checkpoint: HeadCheckpoint, target: Any, dtype: str, tokens: int) -> tuple[Head, dict[str, Wire]]:
        """Read a head for a target of so many tokens; return in words each way to wire it that its files leave open."""

    def load(self, checkpoint: HeadCheckpoint, target: Any, contract: Contract, sample: Sample) -> LoadedHead:
        """Join a head to a loaded target; what its configuration leaves open, its overlap on a sample decides."""
        name, fields = checkpoint.name, checkpoint.fields
        for part, known in self.known.items():
            refuse_unknown(name, fields.get(part) or {} if part else fields, known)
        head, ways = self.read(checkpoint, target, contract.dtype, sample.vocab_size)
        readings = {way: measured(head, wire(), target, sample) for way, wire in ways.items()}
        chosen = max(readings, key=lambda way: sum(readings[way]))
        features = ways[chosen]()
        own, notes = head.contract(name, contract), self.notes(name, readings, chosen)
        size = target.config.hidden_size
        if contract.image_size and head.reads_embeddings and head.config.hidden_size == size:
            own = own.with_images(size)
        return LoadedHead(checkpoint.label, head, features, own, notes, readings)

    def notes(self, name: str, readings: Mapping[str, list[float]], chosen: str) -> list[str]:
        """Say how a head was wired, and what was chosen among."""
        notes = [f"{name} {chosen}: it overlaps with its target by {in_words(readings[chosen])}"]
        notes += [f"not taken: {way}, by {in_words(own)}" for way, own in readings.items() if way != chosen]
        if readings[chosen][0] < WEAK:
            notes.append(
                f"{name} agrees with this target on few tokens, however it is wired; it was probably trained for "
                "another target, or for other text"
            )
        return notes


def in_words(shares: Iterable[float]) -> str:
    return ", then ".join(f"{share:.3f}" for share in shares)
