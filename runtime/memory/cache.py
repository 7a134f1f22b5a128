"""The key and value cache of one model. To truncate is to lower an index: nothing is ever sliced off or zeroed."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...engines import Contract, EngineError, cache_rows


class CacheFull(EngineError):
    """A cache cannot grow; what it held is as it was."""


class KVCache(ABC):
    """Only a cache knows where a row is in memory. The first `entries[row]` entries of a row are valid.

    What lies beyond them is garbage, and the next step overwrites it.
    """

    def __init__(self, contract: Contract, device: str, max_rows: int) -> None:
        self.contract, self.device = contract, device
        self.entries = [0] * max_rows
        self.whole = torch.zeros(0)  # all buffers in one
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
        """Let two rows change places."""

    @abstractmethod
    def read(self, row: int, name: str) -> Tensor:
        """Return all entries [kv_heads, T, head_dim] that a row has memory for in one of the buffers."""

    @abstractmethod
    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether rows of these lengths fit together into what the cache may take."""

    @abstractmethod
    def keep(self, row: int, place: int) -> int:
        """Keep the block of a row that begins at 32 · `place`, whatever becomes of the row; return its number."""

    @abstractmethod
    def reuse(self, row: int, blocks: Sequence[int]) -> None:
        """Begin an empty row with kept blocks."""

    @abstractmethod
    def drop(self, block: int) -> None:
        """Keep a block no longer."""

    def wrote(self, row: int, begin: int, end: int) -> None:
        """Note that a call has written this row from entry `begin` on, and that its first `end` entries are valid now.

        Nothing before `begin` may be missing; an `end` below what was valid takes back what lies beyond it.
        """
        assert 0 <= begin <= self.entries[row], f"row {row} has {self.entries[row]} entries, a call began at {begin}"
        self.entries[row] = end

    def free(self, row: int) -> None:
        self.entries[row] = 0

    def clear(self) -> None:
        """Free all rows."""
        for row in range(len(self.entries)):
            self.free(row)

    def close(self) -> None:
        """Free the memory."""
        self.whole, self.buffers = torch.zeros(0), {}

    @property
    def everything(self) -> dict[str, Tensor]:
        """The memory of all rows, as engines take it."""
        return self.buffers

    def tensors(self, first_row: int, rows: int) -> dict[str, Tensor]:
        """Return the memory that a step over these rows takes, by contract name."""
        return cache_rows(self.contract, self.everything, first_row, rows)

    def _use(self, whole: Tensor) -> None:
        """Take other memory; steps over the old are void."""
        self.whole, self.buffers = whole, dict(zip(self.contract.cache_names, whole, strict=True))
        self.version += 1

    def _allocate(self, rows: int, tokens: int, make: Callable[..., Tensor] = torch.zeros) -> Tensor:
        """Make all buffers, of so many rows, or blocks, of so many tokens."""
        contract = self.contract
        size = (len(contract.cache_names), rows, contract.kv_heads, tokens, contract.head_dim)
        try:
            # Masked entries are multiplied by zero, so they must be finite.
            return make(size, dtype=getattr(torch, contract.dtype), device=self.device)
        except torch.OutOfMemoryError:  # on a GPU, where weights count too: the decoder reports it
            raise
        except RuntimeError as error:
            need = contract.cache_bytes_per_token * rows * tokens
            raise CacheFull(
                f"no memory for a cache of {rows} × {tokens} tokens: it takes {need / 2**20:,.0f} MiB; "
                "lower max_batch or the lengths of prompts and outputs, or set cache_bytes"
            ) from error
