"""The key and value buffers of one model. Truncation is an index: nothing here is ever sliced off or zeroed.

Where the engine allows it the buffers are only as long as the longest live row needs and grow in steps, because
attention costs what the buffer holds, dead rows included.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ...engines import GRANULE, Contract, EngineError


class KVCache:
    """Buffers [rows, kv_heads, T, head_dim] by contract name; rows beyond a request's length are garbage."""

    def __init__(self, contract: Contract, device: str, rows: int, capacity: int) -> None:
        self._contract, self._device = contract, device
        self.buffers: dict[str, Tensor] = {}
        self.rows = self.capacity = 0
        self.resize(rows, capacity, {})

    def resize(self, rows: int, capacity: int, kept: Mapping[int, int]) -> None:
        """Reallocate, keeping the first `kept[row]` entries of each row."""
        contract = self._contract
        size = (rows, contract.kv_heads, capacity, contract.head_dim)
        dtype = getattr(torch, contract.dtype)
        buffers = {}
        for name in contract.cache_names:
            try:
                # Masked entries are multiplied by zero, so they must be finite.
                buffers[name] = torch.zeros(size, dtype=dtype, device=self._device)
            except torch.OutOfMemoryError:  # a GPU's, where weights count too: the decoder says it
                raise
            except RuntimeError as error:
                need = contract.cache_bytes_per_token * rows * capacity
                raise EngineError(
                    f"no memory for a cache of {rows} rows of {capacity} tokens: it takes {need / 2**20:,.0f} MiB; "
                    "lower max_batch or the lengths of prompts and outputs"
                ) from error
            for row, length in kept.items():
                buffers[name][row, :, :length] = self.buffers[name][row, :, :length]
        self.buffers, self.rows, self.capacity = buffers, rows, capacity

    def move(self, source: int, destination: int, length: int) -> None:
        if length:  # a row that holds nothing may lie beyond the buffers
            for buffer in self.buffers.values():
                buffer[destination, :, :length] = buffer[source, :, :length]

    def fits(self, rows: int, capacity: int) -> bool:
        """Whether `rows` rows of `capacity` have room, and not far too much of it."""
        enough = rows <= self.rows and capacity <= self.capacity
        return enough and self.capacity <= 2 * _ample(capacity) and self.rows <= 4 * rows

    def fit(self, rows: int, capacity: int, kept: Mapping[int, int]) -> bool:
        """Make room for `rows` rows of `capacity`, or give back what is far too much; True if reallocated."""
        if self.fits(rows, capacity):
            return False
        self.resize(1 << (rows - 1).bit_length(), _ample(capacity), kept)
        return True


def _ample(capacity: int) -> int:
    return _round_up(capacity + capacity // 8)


def _round_up(length: int) -> int:
    return -(-length // GRANULE) * GRANULE
