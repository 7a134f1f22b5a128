"""Faults of recurrent layers, planted in the code that runs: their states have absorbed what was not accepted.

Each is made of the function that it replaces, and notes where it changes something: a bundle may give it no occasion.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ...engines import Recurrence, Step
from ...runtime.memory.row_cache import RowCache
from ...runtime.memory.snapshots import Snapshots
from .faults import planted

Note = Callable[[str], None]


def with_one_too_many(begin: Any, note: Note) -> Any:
    """A rejected token is absorbed with the accepted ones."""

    def faulty(self: Recurrence, step: Step, first: int = 0) -> Step:
        found: Step = begin(self, step, first)
        base, runs = (each[first : first + len(step.start)] for each in (self.base, self.runs))

        def run() -> None:
            count = step.inputs["start"] - base
            more = runs & (base > 0) & (count < step.inputs["pending"].shape[1])
            if more.any():
                note("a row had read more")
            base.sub_(more.long())
            found.run()

        return replace(found, run=run)

    return faulty


def with_padding(read: Any, note: Note) -> Any:
    """A row that is read beside a longer one absorbs as much."""

    def faulty(self: Recurrence, step: Step, first: int, tokens: Any) -> Step:
        width = step.inputs["input_ids"].shape[1]
        found: Step = read(self, step, first, width)
        base = self.base[first : first + len(step.start)]
        if torch.as_tensor(tokens).min() < width:
            note("a row was padded")

        def run() -> None:
            found.run()
            torch.add(step.inputs["start"], tokens, out=base)

        return replace(found, run=run)

    return faulty


def out_of_order(straighten: Any, note: Note) -> Any:
    """The path of a tree stays where it was read."""

    def faulty(self: Recurrence, memory: Any, start: Any, path: Any, first: int = 0) -> None:
        if (path != torch.arange(path.shape[1], device=path.device)).any():
            note("a path branched")

    return faulty


def left_behind(move: Any, note: Note) -> Any:
    """States stay where their row was."""

    def faulty(self: RowCache, source: int, destination: int) -> None:
        before = [states.clone() for states in self.memory.rows]
        if before and self.entries[source]:
            note("a row moved")
        move(self, source, destination)
        for states, old in zip(self.memory.rows, before, strict=True):
            states[:, destination] = old[:, destination]

    return faulty


def older(restore: Any, note: Note) -> Any:
    """A row begins with kept blocks, but as if it had absorbed nothing."""

    def faulty(self: Snapshots, row: int, block: int) -> None:
        note("a prefix was found")

    return faulty


STATE_FAULTS: dict[str, tuple[type, str, Callable[[Any, Note], Any]]] = {
    "token that fell absorbed": (Recurrence, "begin", with_one_too_many),
    "padding absorbed": (Recurrence, "read", with_padding),
    "path of a tree absorbed out of order": (Recurrence, "straighten", out_of_order),
    "states left behind when a row moves": (RowCache, "move", left_behind),
    "prefix found with older states": (Snapshots, "restore", older),
}


@contextmanager
def state_fault(name: str, changed: list[str] | None = None) -> Iterator[list[str]]:
    """Plant the fault of this name for as long as the block runs; note in `changed` what it has changed."""
    owner, method, make = STATE_FAULTS[name]
    changed = [] if changed is None else changed
    with planted((owner, method, make(getattr(owner, method), changed.append))):
        yield changed
