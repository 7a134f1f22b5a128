"""The shapes that requests may ask for: a line, written 5, and what a user may write to have branches beside it.

5+3     a comb: three branches beside a line of five, and nothing follows a branch
4/12    a tree: 12 proposals, none deeper than 4, placed where they are most likely to be accepted
3x2x1   a tree: three tokens may come next, two may follow each of them, and one each of those
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple

from ...engines import MAX_DRAFT_LENGTH, RequestError

LINE = MAX_DRAFT_LENGTH + 1  # uniforms of a line's proposals, and of the next token
MOST_CHILDREN = 4  # of one node, counting the line's own
MOST_LINES = 4  # of one row; each further line has uniforms of its own after those of the first
MOST_BRANCHES = (MOST_LINES - 1) * MAX_DRAFT_LENGTH  # beside a line; each has uniforms of its own there, too

TAKEN = 0.75  # how often the first of a node's children is expected to be accepted before it is drawn
EACH_FURTHER = 0.5  # of what is left then, for each that follows


class Branch(NamedTuple):
    """A proposal beside the line."""

    parent: int  # in the level before: 0 is the line's own, 1 the first branch there; of leaves the place on the line
    rank: int  # among the parent's children, in the order in which they are tested


Levels = tuple[tuple[Branch, ...], ...]  # of each level, whatever its line has there


@dataclass(frozen=True)
class Shape:
    """A line of proposals, and branches beside it that its drafter makes; the line is the first child of each node."""

    text: str  # as a user writes it
    length: int  # of the line
    beyond: int = 0  # how many branches there are
    leaves: bool = False  # nothing follows a branch: they are placed once the line is known, and no draft reads them
    fixed: bool = False  # no score may choose other places for them

    def __str__(self) -> str:
        return self.text

    @property
    def nodes(self) -> int:
        return self.length + self.beyond

    @property
    def is_number(self) -> bool:
        """Whether it is written as a number: 4+0 proposes the same as 4, but asks for what a comb needs."""
        return self == line(self.length)

    @cached_property
    def levels(self) -> Levels:
        """The places of its branches while no token is known; those of leaves are one level."""
        return _likeliest(self.length, self.beyond, self.leaves)

    def within(self, room: int) -> "Shape":
        """Return what there is room for, beside the same line."""
        if self.beyond <= room:
            return self
        return line(self.length) if self.fixed else (comb if self.leaves else tree)(self.length, room)


@dataclass(frozen=True)
class Regular(Shape):
    """A tree in which each node of a level has equally many children."""

    each: tuple[int, ...] = ()

    @cached_property
    def levels(self) -> Levels:
        found, nodes = [], 1
        for count in self.each:
            own = [Branch(parent, rank) for parent in range(nodes) for rank in range(count)]
            found.append(tuple(own[1:]))  # the first is the line's
            nodes = len(own)
        return tuple(found)


@cache
def line(length: int) -> Shape:
    return Shape(str(length), length)


def comb(length: int, beyond: int) -> Shape:
    return Shape(f"{length}+{beyond}", length, beyond, leaves=True)


def tree(length: int, beyond: int) -> Shape:
    return Shape(f"{length}/{length + beyond}", length, beyond)


def regular(*each: int) -> Shape:
    length, nodes = len(each), sum(prod(each[: level + 1]) for level in range(len(each)))
    return Regular("x".join(map(str, each)), length, nodes - length, fixed=True, each=each)


FORMS: dict[str, Callable[..., Shape]] = {  # by how a user writes them, what makes one of their numbers
    r"\d{1,3}\+\d{1,3}": comb,
    r"\d{1,3}/\d{1,3}": lambda length, nodes: tree(length, nodes - length),
    r"\d{1,2}(x\d{1,2}){1,15}": regular,
}


def read_shape(text: str) -> Shape | None:
    """Read a text like 5+3; None if it is none."""
    for pattern, make in FORMS.items():
        if re.fullmatch(pattern, text, re.ASCII):
            return make(*map(int, re.findall(r"\d+", text, re.ASCII)))
    return None


def refuse_large(shape: Shape, longest: int, most: int, limit: str = "") -> None:
    """Refuse a shape of more proposals than have a place, or than a round verifies."""
    small = 1 <= shape.length <= longest and 0 <= shape.beyond <= MOST_BRANCHES and shape.nodes <= most
    if not small or not _has_places(shape):
        raise RequestError(
            f"draft_length is {shape}, expected 1 to {longest} levels, at most {MOST_CHILDREN} children of a node, "
            f"{MOST_BRANCHES} proposals beside the line, and at most {most} together{limit}",
            "draft_length",
        )


def _has_places(shape: Shape) -> bool:
    """Whether all of its branches have a place."""
    placed = [branch for level in shape.levels for branch in level]
    return len(placed) == shape.beyond and all(branch.rank < MOST_CHILDREN for branch in placed)


def _likeliest(length: int, count: int, leaves: bool) -> Levels:
    """Return the branches that are most likely to be accepted, `count` of them, beside a line of this length."""
    levels: list[list[Branch]] = [[] for _ in range(length)]
    waiting: list[tuple[float, int, Branch]] = []  # how likely, negative, its level, and what it is

    def wait_for(reached: float, level: int, branch: Branch) -> None:
        if level < length and branch.rank < MOST_CHILDREN:
            heappush(waiting, (-reached * share(branch.rank), level, branch))

    for level in range(length):
        wait_for(TAKEN**level, level, Branch(0, 1))
    while waiting and sum(map(len, levels)) < count:
        rating, level, branch = heappop(waiting)
        levels[level].append(branch)
        wait_for(-rating / share(branch.rank), level, Branch(branch.parent, branch.rank + 1))
        if not leaves:
            wait_for(-rating, level + 1, Branch(len(levels[level]), 0))
    if leaves:
        return (tuple(Branch(place, branch.rank) for place, level in enumerate(levels) for branch in level),)
    return tuple(map(tuple, levels))


def share(rank: int) -> float:
    """Return how often a child of this rank is expected to be accepted where its parent is."""
    return TAKEN if rank == 0 else (1 - TAKEN) * EACH_FURTHER**rank
