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


class Repeated(Respread):
    """These are repeated for each head: a shard can repeat them for its own."""

    def __init__(self, seeds: frozenset[Seed], part: Part) -> None:
        super().__init__(seeds, f"it is repeated {part.size} times")
        self.part = part


@dataclass(frozen=True)
class Spread:
    axis: int
    parts: tuple[Part, ...]
    seeds: frozenset[Seed]  # that it comes from
    blocks: int = 1  # of the axis, each of which is in these parts: rows were folded with heads

    def share(self, shards: int) -> int:
        return self.blocks * sum(part.share(shards) for part in self.parts)

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
    """Return how a value is spread in another shape: axes are divided into others, as columns into heads, or folded."""
    refused = Whole(spread.seeds, f"{list(before)} becomes {list(after)} along axis {spread.axis}")
    olds, news = next(both for both in _groups(before, after) if spread.axis in both[0])
    outer = prod(before[olds.start : spread.axis]) * spread.blocks  # times that the parts come
    axis = next((axis for axis in news if outer < prod(after[news.start : axis + 1])), None)
    if axis is None or outer % (further := prod(after[news.start : axis])):
        raise refused
    blocks, total = outer // further, sum(part.size for part in spread.parts)
    if after[axis] % blocks:
        raise refused
    size = after[axis] // blocks
    if size % total == 0:  # heads become columns
        parts = tuple(Part(part.size * (size // total), part.units) for part in spread.parts)
        return Spread(axis, parts, spread.seeds, blocks)
    if len(spread.parts) > 1 and all(part == spread.parts[0] for part in spread.parts):  # queries, keys and values
        one = replace(spread, parts=spread.parts[:1], blocks=spread.blocks * len(spread.parts))
        return reshaped(one, before, after, shards)
    if len(spread.parts) > 1 or total % size:
        raise refused
    if not Part(total, size).fits(shards):
        raise InParts(spread.seeds, [total // size] * size) if axis + 2 < news.stop else refused
    if min(spread.parts[0].units, shards) != min(size, shards):
        raise InUnits(spread.seeds, size)
    return Spread(axis, (Part(size, size),), spread.seeds, blocks)


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
