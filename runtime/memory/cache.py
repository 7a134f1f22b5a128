"""The key and value buffers of one model. To truncate is to lower an index: nothing is ever sliced off or zeroed.

If the engine allows it, the buffers are only as long as the longest live row needs and grow in steps, because attention
pays for all that the buffer holds, dead rows included.
"""

import torch
from torch import Tensor

from ...engines import GRANULE, Contract, EngineError


class KVCache:
    """Holds buffers [rows, kv_heads, T, head_dim] by contract name.

    Only this class knows where a row is in memory. The first `entries[row]` entries of a row are valid, the rest are
    garbage.
    """

    def __init__(self, contract: Contract, device: str, max_rows: int, rows: int, capacity: int) -> None:
        self._contract, self._device = contract, device
        self.entries = [0] * max_rows
        self.buffers: dict[str, Tensor] = {}
        self.rows = self.capacity = 0
        self.version = 0  # changes when the buffers move
        self.resize(rows, capacity)

    def resize(self, rows: int, capacity: int) -> None:
        """Reallocate, keeping the valid entries."""
        contract = self._contract
        size = (rows, contract.kv_heads, capacity, contract.head_dim)
        dtype = getattr(torch, contract.dtype)
        buffers = {}
        for name in contract.cache_names:
            try:
                # Masked entries are multiplied by zero, so they must be finite.
                buffers[name] = torch.zeros(size, dtype=dtype, device=self._device)
            except torch.OutOfMemoryError:  # on a GPU, where weights count too: the decoder reports it
                raise
            except RuntimeError as error:
                need = contract.cache_bytes_per_token * rows * capacity
                raise EngineError(
                    f"no memory for a cache of {rows} rows of {capacity} tokens: it takes {need / 2**20:,.0f} MiB; "
                    "lower max_batch or the lengths of prompts and outputs"
                ) from error
            for row, length in enumerate(self.entries):
                if length:
                    buffers[name][row, :, :length] = self.buffers[name][row, :, :length]
        self.buffers, self.rows, self.capacity = buffers, rows, capacity
        self.version += 1

    def move(self, source: int, destination: int) -> None:
        """Move a row to another place; its old place becomes free."""
        length, self.entries[source] = self.entries[source], 0
        if length:  # a row that holds nothing may lie beyond the buffers
            for buffer in self.buffers.values():
                buffer[destination, :, :length] = buffer[source, :, :length]
        self.entries[destination] = length

    def fits(self, rows: int, capacity: int) -> bool:
        """Whether the buffers hold `rows` rows of `capacity` and are not far too large."""
        enough = rows <= self.rows and capacity <= self.capacity
        return enough and self.capacity <= 2 * _ample(capacity) and self.rows <= 4 * rows

    def fit(self, rows: int, capacity: int) -> None:
        """Make room for `rows` rows of `capacity` and all valid entries; shrink buffers that are far too large."""
        if self.fits(rows, capacity):  # nearly always
            return
        used = max((row + 1 for row, length in enumerate(self.entries) if length), default=0)
        rows, capacity = max(rows, used), max([capacity, *self.entries])
        if not self.fits(rows, capacity):
            self.resize(1 << (rows - 1).bit_length(), _ample(capacity))

    def tensors(self, first_row: int, rows: int) -> dict[str, Tensor]:
        """Return the memory of these rows, by contract name."""
        return {name: buffer[first_row : first_row + rows] for name, buffer in self.buffers.items()}


def _ample(capacity: int) -> int:
    return _round_up(capacity + capacity // 8)


def _round_up(length: int) -> int:
    return -(-length // GRANULE) * GRANULE
