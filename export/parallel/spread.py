"""How a value is spread over shards: along one axis, in parts of which each shard has its own share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ...engines import Part as Part

Shape = tuple[int, ...]
Seed = tuple[str, int]  # a matrix whose columns are spread, by what it is in each layer, and which part of them


class Respread(Exception):
    """The matrices of these seeds have to be spread in another way."""

    def __init__(self, seeds: frozenset[Seed], why: str) -> None:
        super().__init__(why)
        self.seeds = seeds


class Whole(Respread):
    """Every shard has to have them whole."""


class InParts(Respread):
    """What reads them takes them apart in these sizes, so that each part has to be spread by itself."""

    def __init__(self, seeds: frozenset[Seed], sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        super().__init__(seeds, f"it is taken apart in {list(sizes)}")


class InUnits(Respread):
    """These are fewer heads than shards, so that some shards have the same one."""

    def __init__(self, seeds: frozenset[Seed], units: int) -> None:
        super().__init__(seeds, f"it has {units} heads")
        self.units = units


@dataclass(frozen=True)
class Spread:
    axis: int
    parts: tuple[Part, ...]
    seeds: frozenset[Seed]  # that it comes from

    def share(self, shards: int) -> int:
        return sum(part.share(shards) for part in self.parts)

    def twice(self, shards: int) -> bool:
        """Whether some shards have the same entries, so that a sum over shards would count these twice."""
        return any(part.units < shards for part in self.parts)

    def alike(self, parts: tuple[Part, ...], shards: int) -> bool:
        """Whether each shard has the same entries of these parts."""
        return [(p.size, min(p.units, shards)) for p in self.parts] == [(p.size, min(p.units, shards)) for p in parts]

    @property
    def whole(self) -> bool:
        """Whether every shard has all entries."""
        return all(part.units == 1 for part in self.parts)

    def along(self, axis: int) -> "Spread":
        return replace(self, axis=axis)

    def local(self, shape: Shape, shards: int) -> Shape:
        return *shape[: self.axis], self.share(shards), *shape[self.axis + 1 :]


def reshaped(spread: Spread, before: Shape, after: Shape, shards: int) -> Spread:
    """Return how a value is spread in another shape; its axis may be divided into heads, or be made of them."""
    refused = Whole(spread.seeds, f"{list(before)} becomes {list(after)} along axis {spread.axis}")
    olds, news = next(both for both in _groups(before, after) if spread.axis in both[0])
    outer = next((axis for axis in olds if before[axis] != 1), spread.axis)
    axis = next((axis for axis in news if after[axis] != 1), None)
    if outer != spread.axis or axis is None:
        raise refused
    size = after[axis]
    if size == before[spread.axis]:
        return spread.along(axis)
    if len(spread.parts) != 1:
        raise refused
    [part] = spread.parts
    if size > part.size:  # heads become columns
        return Spread(axis, (Part(size, part.units),), spread.seeds)
    if part.size % size or not Part(part.size, size).fits(shards):
        raise refused
    if min(part.units, shards) != min(size, shards):
        raise InUnits(spread.seeds, size)
    return Spread(axis, (Part(size, size),), spread.seeds)


def _groups(before: Shape, after: Shape) -> list[tuple[range, range]]:
    """Match the axes of two shapes of one size: the smallest groups of neighbours with equal products."""
    found, i, j = [], 0, 0
    while i < len(before) or j < len(after):
        a, b = min(i + 1, len(before)), min(j + 1, len(after))
        while prod(before[i:a]) != prod(after[j:b]):
            if prod(before[i:a]) < prod(after[j:b]):
                a += 1
            else:
                b += 1
        found.append((range(i, a), range(j, b)))
        i, j = a, b
    return found
