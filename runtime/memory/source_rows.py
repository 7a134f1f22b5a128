"""Hold the sources of a cache's rows: memory that grows with the longest, and moves as rows move."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...engines import GRANULE, SOURCE, SOURCES, Contract, Engine, heads_in_parts
from .full import CacheFull

Made = Sequence[Tensor]  # of each state, what there is of one source [heads, T, size]


class SourceRows:
    """Holds the states of sources as buffers [rows, heads, T, size]; a row that has read nothing has no entries.

    Attention pays for all that a buffer holds, so that it is hardly longer than the longest source, if it may vary.
    """

    def __init__(
        self,
        contract: Contract,
        device: str,
        max_rows: int,
        longest: int,
        moved: Callable[[], None],
        placing: Engine,
        *,
        fixed: bool,
    ) -> None:
        self.entries = [0] * max_rows
        self._states, self._longest, self._moved = contract.of_kind(SOURCE), longest, moved
        self._ragged = SOURCES in contract.capabilities
        self._device, self._placing = device, placing
        self._length = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._buffers: dict[str, Tensor] = {}
        self.rows = self.capacity = 0
        self._fixed = fixed
        if fixed:
            self._resize(max_rows, longest)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The memory of all rows, as engines take it."""
        return self._buffers | ({"source_length": self._length} if self._ragged else {})

    def fit(self, rows: int, entries: int = 0) -> None:
        """Make room for so many rows with sources of so many entries, and give back what is far too much."""
        if self._fixed:
            return
        entries = max([entries, *self.entries])
        capacity = min(-(-entries // GRANULE) * GRANULE, self._longest) if self._ragged else self._longest
        rows = max([rows, *(row + 1 for row, length in enumerate(self.entries) if length)])
        enough = rows <= self.rows and capacity <= self.capacity
        if not enough or self.capacity > 2 * capacity or self.rows > 4 * rows:
            self._resize(min(1 << (rows - 1).bit_length(), len(self.entries)), max(capacity, 1))

    def _resize(self, rows: int, capacity: int) -> None:
        if (rows, capacity) == (self.rows, self.capacity):
            return
        try:
            # What lies after a source is multiplied by zero, so it must be finite.
            made = {
                state.name: self._placing.everywhere(
                    torch.zeros(state.memory(rows, capacity), dtype=getattr(torch, state.dtype), device=self._device)
                )
                for state in self._states
            }
        except torch.OutOfMemoryError:  # on a GPU, where weights count too: the decoder reports it
            raise
        except RuntimeError as error:
            need = rows * capacity * sum(state.bytes for state in self._states) / 2**20
            raise CacheFull(
                f"no memory for {rows} sources of {capacity} entries: they take {need:,.0f} MiB; lower max_batch"
            ) from error
        for name, new in made.items():
            for row, length in enumerate(self.entries):
                if length:
                    new[row, :, :length] = self._buffers[name][row, :, :length]
        self._buffers = made
        self.rows, self.capacity = rows, capacity
        self._moved()

    def put(self, row: int, made: Made) -> None:
        """Give a row what was made of its source."""
        entries = made[0].shape[1]
        self.fit(row + 1, entries)
        for state, each in zip(self._states, made, strict=True):
            parts = heads_in_parts(each.shape[0], state.shape[0])
            self._placing.put(self._buffers[state.name][row, :, :entries], each, 0, parts)
        self._note(row, entries)

    def move(self, source: int, destination: int) -> None:
        length = self.entries[source]
        if length:
            for buffer in self._buffers.values():
                buffer[destination, :, :length] = buffer[source, :, :length]
        self._note(destination, length)
        self._note(source, 0)

    def swap(self, one: int, other: int) -> None:
        ours, theirs = self.entries[one], self.entries[other]
        if longest := max(ours, theirs):
            for buffer in self._buffers.values():
                buffer[[one, other], :, :longest] = buffer[[other, one], :, :longest]
        self._note(one, theirs)
        self._note(other, ours)

    def free(self, row: int) -> None:
        if self.entries[row]:
            self._note(row, 0)

    def _note(self, row: int, entries: int) -> None:
        self.entries[row] = entries
        self._length[row] = entries
