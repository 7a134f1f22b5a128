"""The shapes that requests may ask for beside a plain line: combs, written 5+3, and trees, written 4/12 or 3x2x1."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple, Self

from ...engines import RequestError
from .noise import MOST_CHILDREN

STANDS = 0.75  # how often the first of a node's children is taken to stand before it is drawn
EACH_FURTHER = 0.5  # of what is left then, for each that follows


class Branch(NamedTuple):
    """A proposal of a tree that is not on its line."""

    parent: int  # in the level before: 0 is the line's own, 1 the first branch there
    rank: int  # among the parent's children, in the order in which they are tested


Levels = tuple[tuple[Branch, ...], ...]  # of each level of a tree, whatever its line has there


@dataclass(frozen=True)
class CombLength:
    """A line of proposals, and siblings beside them where they are most likely to be needed; written 5+3."""

    length: int
    siblings: int

    def __post_init__(self) -> None:
        _require_whole("a comb", self, ("length", "siblings"))

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Read a text like 5+3; None if it is none."""
        found = re.fullmatch(r"(\d{1,3})\+(\d{1,3})", text, re.ASCII)
        return cls(*map(int, found.groups())) if found else None

    def __str__(self) -> str:
        return f"{self.length}+{self.siblings}"

    @property
    def beyond(self) -> int:
        """The number of proposals beside its line."""
        return self.siblings


@dataclass(frozen=True)
class TreeLength:
    """A tree that a draft grows level by level; its line is the first child of each node, from the root on.

    4/12:   12 proposals, none deeper than 4, placed where they are most likely to stand
    3x2x1:  three tokens may come next, two may follow each of them, and one each of those
    """

    length: int  # the deepest level
    nodes: int
    children: tuple[int, ...] = ()  # of each node, level by level; none: as they are likely to stand

    def __post_init__(self) -> None:
        _require_whole("a tree", self, ("length", "nodes"))
        if self.children:
            if not all(type(count) is int and count > 0 for count in self.children):
                raise RequestError(f"children of a tree are {self.children!r}, expected whole numbers from 1 on")
            if (self.length, self.nodes) != (found := _size(self.children)):
                raise RequestError(
                    f"length and nodes of a tree with children {self.children} are {self.length} and {self.nodes}, "
                    f"expected {found[0]} and {found[1]}"
                )

    @classmethod
    def read(cls, text: str) -> Self | None:
        """Read a text like 4/12 or 3x2x1; None if it is none."""
        if found := re.fullmatch(r"(\d{1,3})/(\d{1,3})", text, re.ASCII):
            return cls(int(found[1]), int(found[2]))
        if re.fullmatch(r"\d{1,2}(x\d{1,2}){1,15}", text, re.ASCII):
            return cls.of(*map(int, text.split("x")))
        return None

    @classmethod
    def of(cls, *children: int) -> Self:
        """Make the tree in which each node has so many children, level by level."""
        return cls(*_size(children), children)

    def __str__(self) -> str:
        return "x".join(map(str, self.children)) if self.children else f"{self.length}/{self.nodes}"

    @property
    def beyond(self) -> int:
        """The number of proposals beside its line."""
        return self.nodes - self.length

    @cached_property
    def levels(self) -> Levels:
        """The places of its branches while no token is known."""
        return _each_child(self.children) if self.children else _likeliest(self.length, self.beyond)


DraftShape = CombLength | TreeLength


def read_shape(text: str) -> DraftShape | None:
    return CombLength.read(text) or TreeLength.read(text)


def _require_whole(what: str, shape: object, names: Sequence[str]) -> None:
    for name in names:
        if type(getattr(shape, name)) is not int:
            raise RequestError(f"{name} of {what} is {getattr(shape, name)!r}, expected a whole number")


def _size(children: Sequence[int]) -> tuple[int, int]:
    """Return how many levels and how many nodes such a tree has."""
    return len(children), sum(prod(children[: level + 1]) for level in range(len(children)))


def _each_child(children: Sequence[int]) -> Levels:
    levels, nodes = [], 1
    for count in children:
        own = [Branch(parent, rank) for parent in range(nodes) for rank in range(count)]
        levels.append(tuple(own[1:]))  # the first is the line's
        nodes = len(own)
    return tuple(levels)


def _likeliest(length: int, count: int) -> Levels:
    """Return the branches that are most likely to stand, `count` of them, beside a line of this length."""
    levels: list[list[Branch]] = [[] for _ in range(length)]
    waiting: list[tuple[float, int, Branch]] = []  # how likely, negative, its level, and what it is

    def wait_for(reached: float, level: int, branch: Branch) -> None:
        if level < length and branch.rank < MOST_CHILDREN:
            heappush(waiting, (-reached * share(branch.rank), level, branch))

    for level in range(length):
        wait_for(STANDS**level, level, Branch(0, 1))
    while waiting and sum(map(len, levels)) < count:
        stands, level, branch = heappop(waiting)
        levels[level].append(branch)
        wait_for(-stands / share(branch.rank), level, Branch(branch.parent, branch.rank + 1))
        wait_for(-stands, level + 1, Branch(len(levels[level]), 0))
    return tuple(map(tuple, levels))


def share(rank: int) -> float:
    """Return how often a child of this rank is taken to stand where its parent does."""
    return STANDS if rank == 0 else (1 - STANDS) * EACH_FURTHER**rank
