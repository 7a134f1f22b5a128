"""What one step of a model reads, what its recurrent layers absorb, and what comes before it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from ...engines import Recurrence, Step


class Ancestry(Protocol):
    """The part of a tree of tokens that graphs read."""

    depths: Tensor  # [B, S]
    ancestors: Tensor  # [B, S, S]


@dataclass(frozen=True)
class Tokens:
    """The tokens that a step reads, and where they are in the rows from the first on."""

    ids: Tensor  # [B, S]
    start: Tensor  # [B], the entries that the first of them write
    first_row: int = 0
    entries_read: int | None = None  # of each row, by an engine that can leave out the others; None: all
    widths: Tensor | None = None  # [B] tokens of each row, by an engine that can leave out the others; None: S
    ancestry: Ancestry | None = None  # None: a line
    images: Mapping[str, Tensor] = field(default_factory=dict)  # what a step is given of them


@dataclass(frozen=True)
class Absorbs:
    """What recurrent layers absorb before a step, or with it."""

    since: int = 1  # at most so many tokens of a row, which were read before
    read: Tensor | int | None = None  # and so many of the step's own in each row [B], which are there for good
    goes_on: bool = False  # nothing: it comes after another step of the same round

    def over(self, recurrence: Recurrence, step: Step, first_row: int) -> Step:
        """Return a step that does so."""
        if self.goes_on:
            return recurrence.go_on(step, first_row)
        if self.read is not None:
            return recurrence.read(step, first_row, self.read)
        return recurrence.begin(step, first_row)


NO_MORE = Absorbs()  # than the last token


def preceded(prepare: Callable[[], None], step: Step) -> Step:
    """Return a step that prepares its inputs before it runs."""

    def run() -> None:
        prepare()
        step.run()

    return replace(step, run=run)
