"""A cache in blocks of a common pool, which a table assigns to rows; a row takes only as many as its tokens fill."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...engines import BLOCK_TOKENS, ROW, SOURCE, SPARE_BLOCK, Contract
from .cache import KVCache
from .full import CacheFull

FIRST_BLOCKS = 64  # of a pool that may grow


class BlockPool:
    """Numbers blocks, and counts how many rows use each."""

    def __init__(self) -> None:
        self.size = SPARE_BLOCK + 1  # the spare block belongs to no row
        self._users = {SPARE_BLOCK: 1}
        self._free: list[int] = []

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.size - len(self._free) - 1

    def grow(self, size: int) -> None:
        self._free[:0] = reversed(range(self.size, size))  # the lowest numbers are taken first
        self.size = max(self.size, size)

    def take(self) -> int:
        block = self._free.pop()
        self._users[block] = 1
        return block

    def share(self, block: int) -> None:
        """Count one more user of a block."""
        self._users[block] += 1

    def release(self, block: int) -> None:
        """Count one user less; without any the block is free."""
        self._users[block] -= 1
        if not self._users[block]:
            del self._users[block]
            self._free.append(block)


class BlockCache(KVCache):
    """Holds states of tokens in a pool [blocks, heads, 32, size], and a table [rows, blocks of a row].

    Places of the table that have no block name the spare one. With `most_tokens` all memory is taken at once;
    without, the pool grows as rows need it. States of rows have no place in it.
    """

    def __init__(
        self,
        contract: Contract,
        device: str,
        max_rows: int,
        capacity: int,
        most_tokens: int | None = None,
        kept_blocks: int = 0,
    ) -> None:
        super().__init__(contract, device, max_rows)
        assert not contract.of_kind(ROW), "an engine that reads blocks refuses them"
        assert not contract.of_kind(SOURCE), "an engine that reads blocks refuses them"
        self.table = torch.full(
            (max_rows, _blocks(capacity)), SPARE_BLOCK, dtype=torch.int32, device=device
        )  # [rows, blocks]
        self.pool = BlockPool()
        self._owned: list[list[int]] = [[] for _ in range(max_rows)]
        self._limited = most_tokens is not None
        self._most = max_rows * _blocks(capacity) if most_tokens is None else most_tokens // BLOCK_TOKENS
        self._most_with_kept = self._most + kept_blocks
        self._grow(self._most_with_kept if self._limited else min(self._most, FIRST_BLOCKS))

    @property
    def everything(self) -> dict[str, Tensor]:
        return self.buffers | {"blocks": self.table}

    def make_room(self, first_row: int, starts: Sequence[int], widths: Sequence[int]) -> None:
        for row, start, width in zip(range(first_row, first_row + len(starts)), starts, widths, strict=True):
            missing = _blocks(max(start + width, self.entries[row])) - len(self._owned[row])
            if missing > 0:
                self._take(row, missing)
            elif missing < 0:
                self._release(row, len(self._owned[row]) + missing)

    def move(self, source: int, destination: int) -> None:
        self._release(destination, 0)
        self._owned[destination], self._owned[source] = self._owned[source], []
        self.table[destination] = self.table[source]
        self.table[source] = SPARE_BLOCK
        self.entries[destination], self.entries[source] = self.entries[source], 0

    def swap(self, one: int, other: int) -> None:
        self._owned[one], self._owned[other] = self._owned[other], self._owned[one]
        self.entries[one], self.entries[other] = self.entries[other], self.entries[one]
        self.table[[one, other]] = self.table[[other, one]]

    def make_room_to_swap(self, one: int, other: int) -> None:
        pass  # they change their places in the table

    def free(self, row: int) -> None:
        super().free(row)
        self._release(row, 0)

    def read(self, row: int, name: str) -> Tensor:
        blocks = self.buffers[name][self._owned[row]]  # [blocks, heads, 32, size]
        return blocks.transpose(0, 1).flatten(1, 2)

    def keep(self, row: int, place: int) -> int:
        block = self._owned[row][place]
        self.pool.share(block)
        return block

    def reuse(self, row: int, blocks: Sequence[int]) -> None:
        """Nothing is copied: a row never writes below its entries, so that no row writes into these."""
        self._release(row, 0)
        for block in blocks:
            self.pool.share(block)
        self._owned[row] = list(blocks)
        self.table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        self.entries[row] = len(blocks) * BLOCK_TOKENS

    def drop(self, block: int) -> None:
        self.pool.release(block)

    def holds(self, lengths: Sequence[int], widest: int = 0) -> bool:
        return sum(map(_blocks, lengths)) <= self._most

    def _take(self, row: int, count: int) -> None:
        if count > self.pool.free:
            self._grow(self.pool.size - 1 + max(count - self.pool.free, self.pool.size - 1))
        if count > self.pool.free:
            raise CacheFull(
                f"the cache has {self.pool.free} blocks of {BLOCK_TOKENS} tokens left, row {row} needs {count} more; "
                "raise cache_bytes"
            )
        owned = self._owned[row]
        begin = len(owned)
        owned += [self.pool.take() for _ in range(count)]
        self.table[row, begin : len(owned)] = torch.tensor(owned[begin:], dtype=torch.int32)

    def _release(self, row: int, kept: int) -> None:
        """Give back the blocks of a row after the first `kept`."""
        owned = self._owned[row]
        if len(owned) > kept:
            self.table[row, kept : len(owned)] = SPARE_BLOCK
            for block in reversed(owned[kept:]):
                self.pool.release(block)
            del owned[kept:]

    def _grow(self, blocks: int) -> None:
        """Make the pool as large as this, the spare block not counted, if it may be."""
        blocks = min(blocks, self._most_with_kept)
        if blocks + 1 <= self.pool.size and self.buffers:
            return
        memory = self._allocate(blocks + 1, BLOCK_TOKENS)
        for new, old in zip(memory.tokens, self.memory.tokens, strict=bool(self.buffers)):
            new[:, : old.shape[1]] = old
        self._use(memory)
        self.pool.grow(blocks + 1)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
