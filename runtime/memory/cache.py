"""The states that one model keeps of its rows. To truncate is to lower an index: nothing is ever sliced off."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ...engines import ROW, SLOTS, TOKEN, WINDOW, Contract, Engine, Recurrence, cache_rows
from .full import CacheFull
from .source_rows import SourceRows


class Memory(NamedTuple):
    """All states of one shape and dtype lie in one tensor, so that one operation moves them all.

    An ordinary model has a single tensor, of its keys and values.
    """

    tokens: list[Tensor]  # each [states, rows or blocks, heads, T, size]
    rows: list[Tensor]  # each [states, rows, …]
    slots: list[Tensor]  # each [states, rows, 1, slots, size]


HERE = Engine()  # places memory on one device alone


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class KVCache(ABC):
    """Only a cache knows where a row is in memory. The first `entries[row]` entries of a row are valid.

    What lies beyond them is garbage, and the next step overwrites it. A state of a row cannot be truncated: it has
    absorbed its first `bases[row]` tokens, and no call may begin before them. It is zero where a row holds nothing.
    """

    def __init__(self, contract: Contract, device: str, max_rows: int, placing: Engine = HERE) -> None:
        self.contract, self.device, self._placing = contract, device, placing
        self.entries = [0] * max_rows
        self.bases = [0] * max_rows
        self.half = SLOTS // 2  # of a row's slots: the tokens of one call
        self.recurrence = Recurrence(max_rows, self.half, device) if contract.recurrent else None
        self.memory = Memory([], [], [])
        self.sources: SourceRows | None = None  # of a model that reads sources
        self.buffers: dict[str, Tensor] = {}  # parts of it, by contract name
        self.version = 0  # changes when the buffers move

    @abstractmethod
    def make_room(self, first_row: int, starts: Sequence[int], widths: Sequence[int]) -> None:
        """Make room for a step in which row `first_row` + i writes `widths[i]` entries from `starts[i]` on.

        If the buffers move, older steps are void.
        """

    @abstractmethod
    def move(self, source: int, destination: int) -> None:
        """Move a row to another place; its old place becomes free."""

    @abstractmethod
    def swap(self, one: int, other: int) -> None:
        """Let two rows change places, for which there is room."""

    @abstractmethod
    def make_room_to_swap(self, one: int, other: int) -> None:
        """Make the room that two rows need to change places; where there is none, nothing has moved."""

    @abstractmethod
    def read(self, row: int, name: str) -> Tensor:
        """Return all entries [heads, T, size] that a row has memory for in one of the states of tokens."""

    @abstractmethod
    def holds(self, lengths: Sequence[int], widest: int = 0) -> bool:
        """Whether rows of these lengths fit together into what the cache may take, in rounds of the `widest`."""

    @abstractmethod
    def keep(self, row: int, place: int) -> int:
        """Keep the block of a row that begins at 32 · `place`, whatever becomes of the row; return its number."""

    @abstractmethod
    def reuse(self, row: int, blocks: Sequence[int]) -> None:
        """Begin an empty row with kept blocks."""

    @abstractmethod
    def drop(self, block: int) -> None:
        """Keep a block no longer."""

    @property
    def keeps_blocks(self) -> bool:
        """Whether a block of a row can begin another row: somebody must have kept what states were at its end."""
        return not self.contract.of_kind(ROW) or self.contract.recurrent

    @property
    def held_bytes(self) -> int:
        """The bytes of all rows, and of their sources."""
        of_sources = () if self.sources is None else self.sources.buffers.values()
        return nbytes(chain(*self.memory.tokens, *self.memory.rows, *self.memory.slots, of_sources))

    @property
    def kept_bytes(self) -> int:
        """The bytes of blocks that are kept beside the rows."""
        return 0

    def worth_keeping(self, row: int, blocks: Sequence[int | None]) -> int:
        """Return how many of a row's first blocks another can begin with; None means one that is not kept yet."""
        return len(blocks)

    def wrote(self, row: int, begin: int, end: int, absorbed: int | None = None) -> None:
        """Note that a call has written this row from entry `begin` on, and that its first `end` entries are valid now.

        Nothing before `begin` may be missing; an `end` below what was valid takes back what lies beyond it. States of
        the row hold all before `begin`, or for so many tokens that it has `absorbed`.
        """
        assert 0 <= begin <= self.entries[row], f"row {row} has {self.entries[row]} entries, a call began at {begin}"
        if self.memory.rows:
            assert self.bases[row] <= begin <= end, f"row {row} holds {self.bases[row]} tokens, not {begin}"
            self.bases[row] = begin if absorbed is None else absorbed
        self.entries[row] = end

    def free(self, row: int) -> None:
        self.entries[row] = self.bases[row] = 0
        if self.sources is not None:
            self.sources.free(row)
        if self.recurrence is not None:
            self.recurrence.hold(row, 0)

    def since(self, row: int) -> int:
        """Return how many of a row's tokens its states do not hold yet, if it has states."""
        return self.entries[row] - self.bases[row]

    def make_slots(self, tokens: int) -> None:
        """Make room for so many tokens that one call may write and that may be rejected, if the model is recurrent."""
        assert self.recurrence is None, "its cache has slots"

    def clear(self) -> None:
        """Free all rows."""
        for row in range(len(self.entries)):
            self.free(row)

    def close(self) -> None:
        """Free the memory."""
        self.memory, self.buffers, self.sources = Memory([], [], []), {}, None

    @property
    def everything(self) -> dict[str, Tensor]:
        """The memory of all rows, as engines take it."""
        return self.buffers if self.sources is None else self.buffers | self.sources.buffers

    def tensors(self, first_row: int, rows: int) -> dict[str, Tensor]:
        """Return the memory that a step over these rows takes, by contract name."""
        return cache_rows(self.contract, self.everything, first_row, rows)

    def _use(self, memory: Memory) -> None:
        """Take other memory; steps over the old are void."""
        states = chain.from_iterable(chain(*map(self.contract.alike, (TOKEN, ROW, WINDOW))))
        tensors = chain(*memory.tokens, *memory.rows, *memory.slots)
        self.memory = memory
        self.buffers = {state.name: tensor for state, tensor in zip(states, tensors, strict=True)}
        self.moved()

    def moved(self) -> None:
        self.version += 1

    def _allocate(self, rows: int, tokens: int) -> Memory:
        """Make the memory of all states, of so many rows, or blocks, of so many tokens."""
        try:
            # Masked entries are multiplied by zero, so they must be finite.
            of_tokens, states = self.all_of(TOKEN, rows, tokens), self.all_of(ROW, rows, 0)
            return Memory(of_tokens, states, self.all_of(WINDOW, rows, 2 * self.half))
        except torch.OutOfMemoryError:  # on a GPU, where weights count too: the decoder reports it
            raise
        except RuntimeError as error:
            need = self.contract.cache_bytes(rows, tokens)
            raise CacheFull(
                f"no memory for a cache of {rows} × {tokens} tokens: it takes {need / 2**20:,.0f} MiB; "
                "lower max_batch or the lengths of prompts and outputs, or set cache_bytes"
            ) from error

    def all_of(self, kind: str, rows: int, entries: int, make: Callable[..., Tensor] = torch.zeros) -> list[Tensor]:
        """Make the memory of all states of a kind, those of one shape and dtype together."""
        sizes = [(len(group), *group[0].memory(rows, entries)) for group in self.contract.alike(kind)]
        dtypes = [getattr(torch, group[0].dtype) for group in self.contract.alike(kind)]
        return [
            self._placing.everywhere(make(size, dtype=dtype, device=self.device))
            for size, dtype in zip(sizes, dtypes, strict=True)
        ]
