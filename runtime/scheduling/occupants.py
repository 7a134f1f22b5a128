"""Requests that have a row, and the noise that their rounds need."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ..beams.beaming import Beaming
from ..lengths.chooser import Chooser
from ..requests.request import Request
from ..state.asked import Drafting
from ..state.plan import Plan
from ..state.rows import STRETCH, Rows


@dataclass(eq=False)
class Occupant:
    """A request that has a row, and the state that its rounds need."""

    request: Request
    drafting: Drafting  # what the chooser was made for
    chooser: Chooser
    row: int
    number: int  # the younger, the higher
    keys: list[bytes] = field(default_factory=list)  # of its blocks of tokens
    beaming: Beaming | None = None  # its search, if it has beams
    # The stretches whose uniforms are made.
    uniform_stretches: list[tuple[int, bool]] = field(default_factory=lambda: [(-1, False)] * 2)

    @property
    def ended(self) -> bool:
        return self.request.finished or self.request.cancelled


def neighbours(occupants: Sequence[Occupant]) -> Iterator[list[Occupant]]:
    """Group occupants whose rows are adjacent."""
    for _, group in groupby(enumerate(occupants), lambda numbered: numbered[1].row - numbered[0]):
        yield [one for _, one in group]


def refresh_uniforms(rows: Rows, plan: Plan, occupants: Sequence[Occupant]) -> None:
    """Make the uniforms of a round that begins at the known length, or beyond it after a round in flight.

    All of a stretch are made at once, since a row that has ended in the round in flight draws once more; neighbours
    with the same lengths share one call.
    """
    if not plan.draws:
        return
    for_trees = plan.beyond > 0
    lacking: dict[range, list[Occupant]] = {}  # by the lengths
    for occupant in occupants:
        length = occupant.request.length
        for stretch in (length // STRETCH, (length + plan.draft_length + 1) // STRETCH):
            made, made_for_trees = occupant.uniform_stretches[stretch % 2]
            if made != stretch or (for_trees and not made_for_trees):
                occupant.uniform_stretches[stretch % 2] = stretch, for_trees
                lengths = range(max(length, stretch * STRETCH), (stretch + 1) * STRETCH)
                lacking.setdefault(lengths, []).append(occupant)
    for lengths, those in lacking.items():
        for some in neighbours(those):
            rows.fill_uniforms(some[0].row, len(some), lengths, for_trees)
