"""Heads: drafts that read what a target makes of its tokens. Recognised by their configuration and tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ...engines import FEATURES, Contract, ExportError, Masks, State
from ...engines.errors import first_line
from ..checking.quality import Sample
from ..checkpoints.checkpoint import require_weights
from ..checkpoints.reading import read_object
from ..tracing.hidden_states import Features

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class HeadFiles:
    """The files of a head, its weights still unread."""

    name: str  # as the user gave it
    path: Path
    fields: Mapping[str, Any]  # of its config.json

    @property
    def label(self) -> str:
        place = Path(self.name).resolve()
        return place.name if place.exists() else self.name.partition("@")[0]

    def tensors(self) -> dict[str, Tensor]:
        """Read all tensors."""
        found: dict[str, Tensor] = {}
        for file in weight_files(self.name, self.path):
            try:
                with safe_open(file, "pt") as opened:
                    found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            except (OSError, SafetensorError) as error:
                raise ExportError(f"the weights of head {self.name} cannot be read: {first_line(error)}") from error
        return found


@dataclass(frozen=True)
class HeadCheckpoint(HeadFiles):
    """A head that can be exported as a model of its own."""

    kind: "HeadKind"


@dataclass(frozen=True)
class LoadedHead:
    """A head beside its target, wired as it works best."""

    module: Any  # `traced()` gives what is traced of it
    features: Features  # what it reads of the target
    layers: int  # or heads that say one place each
    heads: int  # of a layer's queries
    hidden: int
    vocab_size: int
    states: tuple[State, ...]
    masks: Masks | None = None  # that it reads, if it proposes in one pass behind some
    tables: Mapping[str, Tensor] = field(default_factory=dict)  # that a round reads beside its graph
    notes: list[str] = field(default_factory=list)  # how it was wired, for its user
    readings: dict[str, list[float]] = field(default_factory=dict)  # overlap by place, of each way to wire it

    def contract(self, target: Contract) -> Contract:
        return Contract(self.layers, self.heads, self.states, self.vocab_size, target.max_length, target.dtype)

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


class HeadKind(Protocol):
    """A kind of heads; a bundle's model and the drafter that runs it have its name."""

    @property
    def name(self) -> str: ...

    def recognises(self, fields: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> bool:
        """Say whether a checkpoint is of this kind; without `shapes` its weights are no safetensors."""

    def load(self, checkpoint: HeadCheckpoint, target: Any, contract: Contract, sample: Sample) -> LoadedHead:
        """Join a head to a loaded target; what its configuration leaves open, its overlap on a sample decides."""

    def check(
        self, graph: Path, contract: Contract, head: Any, tokens: Tensor, features: Tensor, quantised: bool
    ) -> tuple[dict[str, Any], Tensor]:
        """Compare a written graph with the head in torch, on the features [L, hidden] of some tokens [L].

        Return the errors, and the graph's logits [L - 1, V] of the place behind the next one, after each token but the
        last.
        """


def filled(head: Any, tensors: Mapping[str, Tensor], name: str, dtype: str) -> None:
    """Give a head its tensors, or say which of them is missing, too many, of another shape or no numbers."""
    expected = {key: tuple(value.shape) for key, value in head.state_dict().items()}
    for key, shape in expected.items():
        if key not in tensors:
            raise ExportError(f"head {name} lacks the tensor {key}; download it again")
        if tuple(tensors[key].shape) != shape:
            raise ExportError(
                f"tensor {key} of head {name} is {list(tensors[key].shape)}, expected {list(shape)}; take the head of "
                "this target"
            )
    if extra := sorted(set(tensors) - set(expected)):
        raise ExportError(f"head {name} has the tensor {extra[0]}, which a head of its config.json does not have")
    for key, value in tensors.items():
        if not torch.stack(torch.aminmax(value)).isfinite().all():
            raise ExportError(f"tensor {key} of head {name} holds numbers that are not finite; take a sound one")
    kind = getattr(torch, dtype)
    head.load_state_dict({key: value.to(kind) for key, value in tensors.items()}, assign=True)
    tied: dict[int, nn.Parameter] = {}  # what a target has once, torch would trace twice
    for module in head.modules():
        for own, weight in module.named_parameters(recurse=False):
            setattr(module, own, tied.setdefault(weight.data_ptr(), weight.requires_grad_(False)))
    head.eval()


def with_features(contract: Contract, heads: Mapping[str, LoadedHead]) -> Contract:
    """Return the contract of a target that keeps features for these heads, side by side.

    They are one state: TensorRT for RTX crashes over two of one shape.
    """
    if not heads:
        return contract
    made = State(FEATURES, (1, sum(head.hidden for head in heads.values())), contract.dtype)
    return replace(contract, states=(made, *contract.states))


def weight_files(name: str, path: Path) -> list[Path]:
    if (path / WEIGHTS).is_file():
        return [path / WEIGHTS]
    if (path / INDEX).is_file():
        shards = read_object(name, path / INDEX).get("weight_map")
        if isinstance(shards, dict):
            return [path / str(shard) for shard in sorted(set(shards.values()))]
    return []


def shapes_of(name: str, path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of all tensors, and nothing else of them; none where there are no safetensors."""
    if not Path(name).is_dir():  # of the Hub, from which small files alone have come
        require_weights(name, path)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weight_files(name, path):
        try:
            with safe_open(file, "pt") as opened:
                shapes |= {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ExportError(f"the weights of checkpoint {name} cannot be read: {first_line(error)}") from error
    return shapes
