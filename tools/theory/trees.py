"""The yield of a tree of proposals, by how often each child of a node is accepted: the first, the second, and so on.

`ranks[r]` is the chance that child r is accepted and none before it; the first is α, and they never rise.
Acceptances are independent of place and depth, as in `theory.py`. A comb whose siblings are hung where this round's
draft is unsure, as ours are, yields more than one whose places are fixed, as here.
"""

from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from math import prod
from typing import NamedTuple

from .lines import tokens_per_round


class Comb(NamedTuple):
    length: int
    siblings: int
    tokens: float  # a round

    def __str__(self) -> str:
        return f"{self.length}+{self.siblings}" if self.siblings else str(self.length)


def tokens_of_tree(parents: Sequence[int], ranks: Sequence[float]) -> float:
    """Return the expected tokens of a round; node i + 1 follows node `parents[i]`, node 0 is the last token.

    The children of a node are tested in the order of their numbers. Each node that is reached is one token.
    """
    reached, children = [1.0], Counter[int]()
    for parent in parents:
        rank = children[parent]
        children[parent] += 1
        reached.append(reached[parent] * (ranks[rank] if rank < len(ranks) else 0.0))
    return sum(reached)


def best_tree(ranks: Sequence[float], nodes: int, depth: int) -> list[int]:
    """Return the parents of the tree of so many nodes, none deeper than `depth`, that yields most.

    It has the nodes that are most often reached, which is what Sequoia's dynamic programme finds: none is reached more
    often than its parent or the child before it.
    """
    parents: list[int] = []
    waiting = [(-ranks[0], 0, 0, 1, 1.0)]  # chance, negated; parent, rank, depth; the parent's chance
    while waiting and len(parents) < nodes:
        chance, parent, rank, at, of_parent = heappop(waiting)
        parents.append(parent)
        if rank + 1 < len(ranks):
            heappush(waiting, (-of_parent * ranks[rank + 1], parent, rank + 1, at, of_parent))
        if at < depth:
            heappush(waiting, (chance * ranks[0], len(parents), 0, at + 1, -chance))
    return parents


class GrownTree(NamedTuple):
    depth: int
    parents: list[int]
    tokens: float  # a round

    def __str__(self) -> str:
        return f"{self.depth}/{len(self.parents)}"


def grown_tree(ranks: Sequence[float], nodes: int, depth: int) -> GrownTree:
    """Return the best tree, as a draft length would name it."""
    parents = best_tree(ranks, nodes, depth)
    return GrownTree(depth_of_tree(parents), parents, tokens_of_tree(parents, ranks))


def combs(ranks: Sequence[float], nodes: int, longest: int) -> list[Comb]:
    """Return for each line the comb that yields most of those that are so many nodes together."""
    found = []
    for length in range(1, min(nodes, longest) + 1):
        beside = [prod((ranks[0],) * place) * rank for place in range(length) for rank in ranks[1:]]
        beside = sorted(beside, reverse=True)[: nodes - length]
        found.append(Comb(length, len(beside), tokens_per_round(ranks[0], length) + sum(beside)))
    return found


def depth_of_tree(parents: Sequence[int]) -> int:
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return max(depths)
