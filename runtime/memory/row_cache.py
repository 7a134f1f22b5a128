"""A cache in which each row has memory of its own.

If the engine allows it, the buffers are only as long as the longest live row needs and grow in steps, because attention
pays for all that a buffer holds, dead rows included.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...engines import BLOCK_TOKENS, GRANULE, MOST_SLOTS, SLOTS, SOURCE, TOKEN, WIDEST_STEP, WINDOW, Contract, Engine
from .cache import HERE, KVCache, nbytes
from .full import CacheFull
from .snapshots import Snapshots
from .source_rows import SourceRows

LEAST_HALF = SLOTS // 2
LEAST_BEFORE = 1  # token before the last committed one, which a draft reads again


class RowCache(KVCache):
    """Holds states of tokens as buffers [rows, heads, T, size], and those of rows as [rows, …]."""

    def __init__(
        self,
        contract: Contract,
        device: str,
        max_rows: int,
        rows: int = 1,
        capacity: int = GRANULE,
        *,
        fixed: bool = False,
        most_tokens: int | None = None,
        kept_blocks: int = 0,
        longest_source: int = 0,
        placing: Engine = HERE,
    ) -> None:
        super().__init__(contract, device, max_rows, placing)
        if contract.of_kind(SOURCE):
            self.sources = SourceRows(contract, device, max_rows, longest_source, self.moved, placing, fixed=fixed)
        kept_blocks = kept_blocks if self.keeps_blocks else 0
        self._kept = self.all_of(TOKEN, kept_blocks, BLOCK_TOKENS, torch.empty)  # each is written before it is read
        self.snapshots = Snapshots(self, kept_blocks, max_rows) if contract.recurrent and kept_blocks else None
        self._unused = list(range(kept_blocks))
        self._fixed, self._most_tokens = fixed, most_tokens
        self._numbers = torch.arange(max(max_rows, WIDEST_STEP), device=device)
        if fixed:
            self._widen(MOST_SLOTS // 2)
        self.rows = self.capacity = 0
        self.resize(rows, capacity)

    @property
    def kept_bytes(self) -> int:
        blocks = len(self._kept[0][0]) if self._kept else 0
        of_states = 0 if self.snapshots is None else self.snapshots.held_bytes
        return nbytes(self._kept) // max(1, blocks) * (blocks - len(self._unused)) + of_states

    def resize(self, rows: int, capacity: int) -> None:
        """Reallocate, keeping what is valid."""
        half = self.memory.slots[0].shape[3] // 2 if self.memory.slots else 0  # until now
        held = min(half, self.half)  # where there are fewer slots now, no row has any
        memory, live = self._allocate(rows, capacity), [row for row, length in enumerate(self.entries) if length]
        for new, old in zip(memory.tokens, self.memory.tokens, strict=bool(self.memory.tokens)):
            for row in live:
                new[:, row, :, : self.entries[row]] = old[:, row, :, : self.entries[row]]
        for new, old in zip(memory.rows, self.memory.rows, strict=bool(self.memory.rows)):
            new[:, live] = old[:, live]
        for new, old in zip(memory.slots, self.memory.slots, strict=bool(self.memory.slots)):
            for place, begin in ((0, 0), (half, self.half)):
                new[:, live, :, begin : begin + held] = old[:, live, :, place : place + held]
        self._use(memory)
        self.rows, self.capacity = rows, capacity

    def move(self, source: int, destination: int) -> None:
        length, base = self.entries[source], self.bases[source]
        self.free(destination)
        if length:  # a row that holds nothing may lie beyond the buffers
            for tensor in self.memory.tokens:
                tensor[:, destination, :, :length] = tensor[:, source, :, :length]
            for tensor in (*self.memory.rows, *self.memory.slots):
                tensor[:, destination] = tensor[:, source]
            if self.recurrence is not None:
                self.recurrence.move(source, destination)
            if self.snapshots is not None:
                self.snapshots.move(source, destination)
        if self.sources is not None:
            self.sources.move(source, destination)
        self.entries[destination], self.bases[destination] = length, base
        self.free(source)

    @torch.inference_mode()  # in which a round may have made the memory
    def free(self, row: int) -> None:
        if row < self.rows:
            for tensor in self.memory.rows:
                tensor[:, row] = 0
        if self.snapshots is not None:
            self.snapshots.free(row)
        super().free(row)
        if self.half > LEAST_HALF and not self._fixed and not self._used:  # wide rounds have made it so
            self._widen(LEAST_HALF)
            self.resize(self.rows, self.capacity)

    def wrote(self, row: int, begin: int, end: int, absorbed: int | None = None) -> None:
        super().wrote(row, begin, end, absorbed)
        if self.snapshots is not None and absorbed is not None:
            self.snapshots.take(row, absorbed)

    def make_room_to_swap(self, one: int, other: int) -> None:
        rows = max(one, other) + 1
        if (longest := max(self.entries[one], self.entries[other])) and not self._fixed:
            self.fit(rows, longest)
        if self.sources is not None and (self.sources.entries[one] or self.sources.entries[other]):
            self.sources.fit(rows)

    def swap(self, one: int, other: int) -> None:
        if longest := max(self.entries[one], self.entries[other]):
            for tensor in self.memory.tokens:
                tensor[:, [one, other], :, :longest] = tensor[:, [other, one], :, :longest]
            for tensor in (*self.memory.rows, *self.memory.slots):
                tensor[:, [one, other]] = tensor[:, [other, one]]
            if self.recurrence is not None:
                self.recurrence.swap(one, other)
            if self.snapshots is not None:
                self.snapshots.swap(one, other)
        if self.sources is not None:
            self.sources.swap(one, other)
        self.entries[one], self.entries[other] = self.entries[other], self.entries[one]
        self.bases[one], self.bases[other] = self.bases[other], self.bases[one]

    def straighten(self, start: Tensor, path: Tensor) -> None:
        """Move entries of the first rows, all [A, W] at once: those at start + path[i] to start + i."""
        row, to = self._numbers[: len(path), None], start[:, None] + self._numbers[: path.shape[1]]
        for tensor in self.memory.tokens:
            tensor[:, row, :, to] = tensor[:, row, :, start[:, None] + path]
        for tensor in self.memory.slots:
            assert self.recurrence is not None
            self.recurrence.straighten(tensor, start, path)

    def reorder(self, row: int, begin: int, order: Sequence[int]) -> None:
        """Move entries of a row: those at begin + order[i] to begin + i."""
        moved = torch.tensor(order, device=self.device) + begin
        for tensor in self.memory.tokens:
            tensor[:, row, :, begin : begin + len(order)] = tensor[:, row, :, moved]

    def make_slots(self, tokens: int) -> None:
        if self.recurrence is None or (half := self._half_for(tokens)) == self.half:
            return
        rows, capacity = self.rows, self.capacity
        if not self._affords(rows, capacity, half):
            rows, capacity = self._ample_rows(max(1, self._used)), _ample(max(self.entries))
        if not self._affords(rows, capacity, half):
            raise CacheFull(f"the cache has no room for rounds of {tokens} tokens in {rows} rows; raise cache_bytes")
        before = self.half
        self._widen(half)
        try:
            self.resize(rows, capacity)
        except CacheFull:
            self._widen(before)
            raise

    def _half_for(self, tokens: int) -> int:
        """Return how many slots one call may fill if so many of its tokens may be rejected."""
        return max(self.half, _least_half(tokens))

    def _widen(self, half: int) -> None:
        self.half = half
        if self.recurrence is not None:
            self.recurrence.resize(half)

    def read(self, row: int, name: str) -> Tensor:
        return self.buffers[name][row]

    def make_room(self, first_row: int, starts: Sequence[int], widths: Sequence[int]) -> None:
        if not self._fixed:  # rows of a step have one width, so that narrower ones are padded
            self.fit(first_row + len(starts), max(starts) + max(widths))
            if self.sources is not None:
                self.sources.fit(first_row + len(starts))

    def keep(self, row: int, place: int) -> int:
        block, begin = self._unused.pop(), place * BLOCK_TOKENS
        for kept, tensor in zip(self._kept, self.memory.tokens, strict=True):
            kept[:, block] = tensor[:, row, :, begin : begin + BLOCK_TOKENS]
        if self.snapshots is not None:
            self.snapshots.keep(row, begin + BLOCK_TOKENS, block)
        return block

    def worth_keeping(self, row: int, blocks: Sequence[int | None]) -> int:
        return len(blocks) if self.snapshots is None else self.snapshots.last(row, blocks)

    def reuse(self, row: int, blocks: Sequence[int]) -> None:
        entries = len(blocks) * BLOCK_TOKENS
        self.make_room(row, [0], [entries])
        for kept, tensor in zip(self._kept, self.memory.tokens, strict=True):
            tensor[:, row, :, :entries] = kept[:, list(blocks)].transpose(1, 2).flatten(2, 3)
        self.entries[row] = entries
        if self.snapshots is not None:
            assert self.recurrence is not None
            self.snapshots.restore(row, blocks[-1])
            self.recurrence.hold(row, entries)
            self.bases[row] = entries

    def drop(self, block: int) -> None:
        if self.snapshots is not None:
            self.snapshots.drop(block)
        self._unused.append(block)

    def holds(self, lengths: Sequence[int], widest: int = 0) -> bool:
        alone = len(lengths) == 1  # it begins when no other has slots
        half = _least_half(widest) if alone else self._half_for(widest)
        return self._fixed or self._affords(self._ample_rows(len(lengths)), _ample(max(lengths)), half)

    def _affords(self, rows: int, capacity: int, half: int) -> bool:
        """Whether the budget allows so many rows, with more slots than are set aside for each."""
        if self._most_tokens is None:
            return True
        each = self.contract.cache_bytes_per_token
        if not each:  # all slots are set aside
            return self._most_tokens > 0
        more = rows * (2 * half - SLOTS) * sum(state.bytes for state in self.contract.of_kind(WINDOW))
        return rows * capacity * each + more <= self._most_tokens * each

    def fits(self, rows: int, capacity: int) -> bool:
        """Whether the buffers hold `rows` rows of `capacity` and are not far too large."""
        long_enough = capacity <= self.capacity <= 2 * _ample(capacity) or not self.memory.tokens
        return rows <= self.rows <= 4 * rows and long_enough

    def fit(self, rows: int, capacity: int) -> None:
        """Make room for `rows` rows of `capacity` and all valid entries; shrink buffers that are far too large."""
        if self.fits(rows, capacity):  # nearly always
            return
        rows, capacity = max(rows, self._used), max([capacity, *self.entries])
        if not self.fits(rows, capacity):
            try:
                self._resize_within_budget(self._ample_rows(rows), _ample(capacity))
            except CacheFull:
                if rows > self.rows or capacity > self.capacity:  # else they are merely larger than they need be
                    raise

    @property
    def _used(self) -> int:
        """How many of the first rows there must be."""
        return max((row + 1 for row, length in enumerate(self.entries) if length), default=0)

    def _ample_rows(self, rows: int) -> int:
        return min(1 << (rows - 1).bit_length(), len(self.entries))

    def _resize_within_budget(self, rows: int, capacity: int) -> None:
        if not self._affords(rows, capacity, self.half):
            raise CacheFull(
                f"the cache has room for {self._most_tokens:,} tokens, not for {rows} rows of {capacity:,}; "
                "raise cache_bytes"
            )
        self.resize(rows, capacity)


def _least_half(tokens: int) -> int:
    enough = LEAST_HALF if tokens + LEAST_BEFORE <= LEAST_HALF else -(-(tokens + LEAST_BEFORE) // SLOTS) * SLOTS
    return min(enough, MOST_SLOTS // 2)


def _ample(capacity: int) -> int:
    return _round_up(capacity + capacity // 8)


def _round_up(length: int) -> int:
    return -(-length // GRANULE) * GRANULE
