"""Copy recurrent states where a kept block ends, since they cannot be taken back to it.

While a prompt is read, its states are copied at the end of every fourth block. Blocks are kept as far
as they lead to such a copy, since a row cannot begin with others.
"""

from collections.abc import Sequence

import torch

from ...engines import BLOCK_TOKENS, ROW
from .cache import KVCache, nbytes

EVERY = 4 * BLOCK_TOKENS  # tokens


class Snapshots:
    """Copies of the states of rows: some belong to a row that is read, the others to a kept block."""

    def __init__(self, cache: KVCache, kept_blocks: int, max_rows: int) -> None:
        self._cache = cache
        count = kept_blocks * BLOCK_TOKENS // EVERY + max_rows
        self._copies = cache.all_of(ROW, count, 0, torch.empty)  # each [states, copies, …]
        self._unused = list(range(count))
        self._of_row: list[dict[int, int]] = [{} for _ in range(max_rows)]  # by the tokens that they hold
        self._of_block: dict[int, int] = {}

    @property
    def held_bytes(self) -> int:
        count = len(self._copies[0][0])
        return nbytes(self._copies) // count * (count - len(self._unused))

    def take(self, row: int, tokens: int) -> None:
        """Copy the states of a row that hold so many tokens, if that is worth it and there is room."""
        if tokens % EVERY == 0 and tokens not in self._of_row[row] and self._unused:
            copy = self._of_row[row][tokens] = self._unused.pop()
            for copies, states in zip(self._copies, self._cache.memory.rows, strict=True):
                copies[:, copy] = states[:, row]

    def keep(self, row: int, tokens: int, block: int) -> None:
        """Give a kept block, which ends after so many tokens of a row, the copy that belongs there."""
        copy = self._of_row[row].pop(tokens, None)
        if copy is not None:
            self._of_block[block] = copy

    def last(self, row: int, blocks: Sequence[int | None]) -> int:
        """Return how many of a row's first blocks lead to a copy: a kept block's, or the row's where none is kept."""
        for place in range(len(blocks), 0, -1):
            block = blocks[place - 1]
            if block in self._of_block or (block is None and place * BLOCK_TOKENS in self._of_row[row]):
                return place
        return 0

    def restore(self, row: int, block: int) -> None:
        """Let a row that begins with blocks up to this one have its states; it has absorbed all their tokens."""
        for copies, states in zip(self._copies, self._cache.memory.rows, strict=True):
            states[:, row] = copies[:, self._of_block[block]]

    def drop(self, block: int) -> None:
        if (copy := self._of_block.pop(block, None)) is not None:
            self._unused.append(copy)

    def free(self, row: int) -> None:
        self._unused += self._of_row[row].values()
        self._of_row[row] = {}

    def move(self, source: int, destination: int) -> None:
        self.free(destination)
        self._of_row[destination], self._of_row[source] = self._of_row[source], {}

    def swap(self, one: int, other: int) -> None:
        self._of_row[one], self._of_row[other] = self._of_row[other], self._of_row[one]
