"""Lessons: a kind of head says how it is built, what it loses, what it proposes, how it is written."""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ...training_settings import HeadSettings
from ..learning import NEGLIGIBLE
from ..training import divergence
from .spoken import Rows, Spoken
from .teacher import Teacher

FIRST = 0.4  # share of the training in which divergence alone is learned
LATER = 0.8  # what a place of a round counts beside the one before it

Head = TypeVar("Head", bound=nn.Module)


class Lesson(ABC, Generic[Head]):
    """One kind of head for one target."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher

    @property
    @abstractmethod
    def layers(self) -> tuple[int, ...]:
        """Return the target's hidden states that it reads, as transformers counts them."""

    @abstractmethod
    def begin(self, spoken: Spoken, settings: HeadSettings) -> Head:
        """Build the head, the same from the same rows; what it knows already is the target's."""

    @abstractmethod
    def rates(self, head: Head) -> list[tuple[Tensor, float]]:
        """The weights that learn at another rate, beside 1 for the rest: they begin near their end, or are small."""

    @abstractmethod
    def loss(self, head: Head, rows: Rows, done: float, draw: Any) -> Tensor:
        """Return what the head misses of these rows; `done` is the share of training done, `draw` a generator."""

    @abstractmethod
    def distributions(self, head: Head, rows: Rows, places: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For places 1, 2, … of a round: whose distributions it proposes for [S], and its logits [B, S, V]."""

    @abstractmethod
    def tensors(self, head: Head) -> dict[str, Tensor]:
        """Return what is written of it, by the names that others read."""

    @abstractmethod
    def fields(self, head: Head) -> dict[str, Any]:
        """Its config.json."""

    def write(self, head: Head, folder: Path) -> None:
        kept = {
            name: weight.detach().to("cpu", torch.float16 if weight.is_floating_point() else weight.dtype).contiguous()
            for name, weight in self.tensors(head).items()
        }
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.fields(head), indent=2) + "\n", encoding="utf-8")

    @property
    def target_name(self) -> str:
        target = self.teacher.checkpoint
        return target.label if Path(target.name).exists() else target.name.partition("@")[0]


def over(done: float) -> float:
    """How far the loss has gone over from divergence to what is wanted: that proposals are accepted."""
    return max(0.0, (done - FIRST) / (1 - FIRST))


def missed(p: Tensor, log_q: Tensor, over: float) -> Tensor:
    """Return what proposals drawn from q lose [B, S]; p is the target's, or as much of it as the head may say."""
    accepted = torch.minimum(p, log_q.exp()).sum(-1)
    reached = p.sum(-1)
    apart = divergence(p, log_q) - torch.special.xlogy(
        reached, reached
    )  # 0 where q is the distribution of these tokens
    lost: Tensor = (1 - over) * apart - over * accepted.clamp(min=NEGLIGIBLE).log()
    return lost
