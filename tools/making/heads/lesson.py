"""What a kind of head must say to be trained: how it is built, what it loses, what it proposes, how it is written."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from .settings import Settings
from .spoken import Rows, Spoken
from .teacher import Teacher

Head = TypeVar("Head", bound=nn.Module)


class Lesson(ABC, Generic[Head]):
    """One kind of head for one target."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher

    @property
    @abstractmethod
    def layers(self) -> tuple[int, ...]:
        """Of which of the target's hidden states it reads, as transformers counts them."""

    @abstractmethod
    def begin(self, spoken: Spoken, settings: Settings) -> Head:
        """Build the head, the same from the same rows; what it knows already is the target's."""

    @abstractmethod
    def rates(self, head: Head) -> list[tuple[Tensor, float]]:
        """The weights that learn at another rate, beside 1 for the rest: they begin near their end, or are small."""

    @abstractmethod
    def loss(self, head: Head, rows: Rows, done: float, draw: Any) -> Tensor:
        """What the head misses of these rows; `done` is the share of the training that is over, `draw` a generator."""

    @abstractmethod
    def laws(self, head: Head, rows: Rows, places: int) -> Iterator[tuple[Tensor, Tensor]]:
        """For place 1, 2 and so on of a round: which tokens' laws it proposes for [S], and its logits [B, S, V]."""

    @abstractmethod
    def write(self, head: Head, folder: Path) -> None:
        """Write it as others read it."""
