"""The parts of an axis of which each shard of a graph has its own share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Neighbouring entries along an axis, in units that stay together: heads, or single columns."""

    size: int
    units: int

    def fits(self, shards: int) -> bool:
        return self.size % self.units == 0 and (self.units % shards == 0 or shards % self.units == 0)

    def share(self, shards: int) -> int:
        """Return how many entries each shard has."""
        return self.size // min(self.units, shards)

    def begin(self, rank: int, shards: int) -> int:
        """Return the first entry of a shard; where units are fewer than shards, neighbours have the same one."""
        return rank * min(self.units, shards) // shards * self.share(shards)


def heads_in_parts(whole: int, own: int) -> tuple[Part, ...]:
    """Return the parts of so many heads of which a shard has its own; nothing if it has all."""
    return () if whole == own else (Part(whole, whole),)


def own_share(whole: "Tensor", axis: int, parts: Sequence[Part], rank: int, shards: int) -> "Tensor":
    """Return what a shard has of a tensor whose axis is these parts."""
    import torch

    begin, found = 0, list["Tensor"]()
    for part in parts:
        found.append(whole.narrow(axis, begin + part.begin(rank, shards), part.share(shards)))
        begin += part.size
    return found[0] if len(found) == 1 else torch.cat(found, axis)
