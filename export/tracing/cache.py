"""The cache that is traced: it writes a call's entries in place, each state by one TensorScatter."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from ...engines import scale_of
from .eight_bits import narrowed, widened

OPSET = 24


class Places(NamedTuple):
    """The places of a call's tokens."""

    start: Tensor  # [B], the cache row of the first
    depths: Tensor  # [B, S], the position of each from there on
    ancestors: Tensor  # [B, S, W], which of the last W entries each sees: of a tail before the call, and its own
    tail: Tensor  # [B, W], their positions, from there on

    @classmethod
    def of(cls, start: Tensor, tail: Tensor, ancestors: Tensor) -> "Places":
        """Find the call's own tokens among the entries that a graph gets."""
        own = ancestors.shape[2] - ancestors.shape[1] + torch.arange(ancestors.shape[1])
        return cls(start, tail.index_select(1, own), ancestors, tail)

    @property
    def rows(self) -> Tensor:
        """The cache rows [B, W] of those entries."""
        _, own, listed = self.ancestors.shape
        return self.start[:, None] + (own - listed + torch.arange(listed))


class BothWays(Places):
    """The places of a call in which a token may see later ones, those of its image."""


class ScatterCache(Cache):  # type: ignore[misc]
    """A cache whose `update` writes this call's rows at its start and returns the whole buffers.

    Entries of eight bits are read from there as well, so that a token sees its own as later ones will.
    """

    def __init__(self, places: Places, kept: dict[str, Tensor]) -> None:
        self.layers: list[Any] = []
        self.places, self.kept = places, kept  # by the names of the states

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return self._written(f"key_{layer}", key), self._written(f"value_{layer}", value)

    def _written(self, name: str, entries: Tensor) -> Tensor:
        scale, start = scale_of(name), self.places.start
        if scale not in self.kept:
            self.kept[name] = written(self.kept[name], entries, start)
            return self.kept[name]
        narrow, scales = narrowed(entries, self.kept[name].dtype, self.kept[scale].dtype)
        self.kept[name] = written(self.kept[name], narrow, start)
        self.kept[scale] = written(self.kept[scale], scales, start)
        return widened(self.kept[name], self.kept[scale], entries.dtype)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> Places:
        return self.places

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        keys = (each for name, each in self.kept.items() if name.startswith("key_"))
        return next((each.shape[2] for each in keys), 0), 0  # nobody attends: a mask that nobody reads


def by_layer(past: Sequence[Tensor]) -> dict[str, Tensor]:
    """Name the states of layers that are alike: key_0, value_0, key_1, …"""
    return {f"{('key', 'value')[place % 2]}_{place // 2}": each for place, each in enumerate(past)}


def written(past: Tensor, entries: Tensor, start: Tensor) -> Tensor:
    """Write the entries of a call's tokens [B, heads, S, size] to a state, from `start` on."""
    return torch.onnx.ops.symbolic(
        "TensorScatter",
        [past, entries, start],
        attrs={"axis": 2, "mode": "linear"},
        dtype=past.dtype,
        shape=past.shape,
        version=OPSET,
    )
