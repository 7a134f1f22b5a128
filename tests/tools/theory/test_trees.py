"""Formulas of trees: against all trees that there are, and against the outcomes of a round drawn one by one."""

from collections.abc import Sequence
from itertools import product
from random import Random

import pytest
from trt_spec.tools.theory.lines import tokens_per_round
from trt_spec.tools.theory.trees import Comb, best_tree, combs, depth_of_tree, tokens_of_tree

RANKS = [(0.6, 0.2, 0.1), (0.5, 0.5), (0.8,), (0.3, 0.3, 0.3, 0.1)]


def best_comb(ranks: Sequence[float], nodes: int, longest: int) -> Comb:
    return max(combs(ranks, nodes, longest), key=lambda comb: comb.tokens)


def all_trees(nodes: int, depth: int):
    """The parents of each tree of so many nodes, in each order in which they can be numbered."""
    for parents in product(*(range(node + 1) for node in range(nodes))):
        if depth_of_tree(parents) <= depth:
            yield list(parents)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("depth", [1, 2, 6])
def test_no_tree_of_as_many_nodes_yields_more(ranks: tuple[float, ...], depth: int):
    for nodes in range(1, 7):
        found = best_tree(ranks, nodes, depth)
        assert len(found) <= nodes
        assert depth_of_tree(found) <= depth
        most = max(tokens_of_tree(parents, ranks) for parents in all_trees(nodes, depth))
        assert tokens_of_tree(found, ranks) == pytest.approx(most)


@pytest.mark.parametrize("ranks", RANKS)
def test_no_comb_of_as_many_nodes_yields_more(ranks: tuple[float, ...]):
    def is_comb(parents: list[int]) -> bool:
        followed = [node for node in range(1, len(parents) + 1) if node in parents]
        first = [parents.index(parent) + 1 for parent in dict.fromkeys(parents)]
        return all(node in first for node in followed)  # nothing follows a sibling

    for nodes in range(1, 7):
        comb = best_comb(ranks, nodes, longest=16)
        every = [parents for parents in all_trees(nodes, nodes) if is_comb(parents)]
        assert comb.length + comb.siblings == nodes or len(ranks) == 1
        assert comb.tokens == pytest.approx(max(tokens_of_tree(parents, ranks) for parents in every))


def test_a_line_and_a_root_with_children_have_closed_forms():
    assert tokens_of_tree([0, 1, 2, 3], [0.7]) == pytest.approx(tokens_per_round(0.7, 4))
    assert tokens_of_tree([0, 0, 0], [0.6, 0.2, 0.1]) == pytest.approx(1.9)
    assert tokens_of_tree([], [0.6]) == 1
    assert best_comb([0.7], 20, longest=16) == (16, 0, pytest.approx(tokens_per_round(0.7, 16)))
    assert best_comb([0.6, 0.2, 0.1], 4, longest=16)[:2] == (3, 1)
    assert str(best_comb([0.6, 0.2, 0.1], 4, longest=16)) == "3+1"


def test_drawn_rounds_yield_what_is_expected():
    """20,000 rounds on a tree: at each node at most one child stands."""
    parents, ranks, random = [0, 0, 1, 1, 2, 3], [0.5, 0.25], Random(0)
    children = {node: [i + 1 for i, parent in enumerate(parents) if parent == node] for node in range(7)}
    tokens = 0
    for _ in range(20_000):
        node: int | None = 0
        while node is not None:
            tokens += 1
            standing = random.choices([0, 1, None], [*ranks, 1 - sum(ranks)])[0]
            node = children[node][standing] if standing is not None and standing < len(children[node]) else None
    assert tokens / 20_000 == pytest.approx(tokens_of_tree(parents, ranks), rel=0.02)
