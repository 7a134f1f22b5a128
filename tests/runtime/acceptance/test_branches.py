"""The law of what a round on a tree commits, enumerated by the code that runs: all tokens, all verdicts.

The children of each node are drawn from the draft without replacement; whatever stands is continued by the target.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from trt_spec.runtime import SamplingParams, TreeLength
from trt_spec.runtime.acceptance import combs, trees
from trt_spec.runtime.acceptance import one_line as acceptance
from trt_spec.runtime.acceptance.seat import admit, make_rows
from trt_spec.runtime.acceptance.trees import accept_tree
from trt_spec.runtime.round import branches
from trt_spec.runtime.state.noise import MOST_BRANCHES
from trt_spec.runtime.state.plan import Level
from trt_spec.runtime.state.proposal import Noise, Proposal
from trt_spec.runtime.state.shapes import Levels
from trt_spec.runtime.state.tree import Tree
from trt_spec.runtime.state.verdict import TreeVerdict

from ..states import make_plan
from .laws import EXACT, Models, V, random_models, verdicts, with_exclusions

REJECTION = SamplingParams(temperature=1.0)
TOKENWISE = SamplingParams(temperature=1.0, rule="tokenwise")
COUPLED = SamplingParams(temperature=1.0, rule="coupled")
LEAST, HIGHEST = 2.0**-49, 1 - 2.0**-49
SHAPES = ("2x1", "2/4", "2/5", "1x2", "3")
LONG = ("2x2", "3/5")


class Node:
    """A node of a shape: the line first, then the branches level by level."""

    def __init__(self, number: int, parent: "Node | None", rank: int) -> None:
        self.number, self.parent, self.rank = number, parent, rank
        self.path: list[Node] = [] if parent is None else [*parent.path, self]
        self.depth = len(self.path)


def read(shape: str) -> TreeLength:
    return TreeLength.read(shape) or TreeLength.of(int(shape))


def nodes_of(shape: TreeLength) -> list[Node]:
    """The root, the line, and the branches."""
    line = [Node(0, None, 0)]
    for _ in range(shape.length):
        line.append(Node(len(line), line[-1], 0))
    found, before = list(line), [line[0]]
    for depth, level in enumerate(shape.levels, 1):
        own = []
        for branch in level:
            own.append(Node(len(found), before[branch.parent], branch.rank))
            found.append(own[-1])
        before = [line[depth], *own]
    return found


def all_tokens(models: Models, nodes: Sequence[Node]) -> dict[tuple[int, ...], float]:
    """All tokens of a tree, node by node, with the probability that the draft draws them."""
    parents = sorted({node.parent for node in nodes if node.parent}, key=lambda node: (node.depth, node.number))
    found: dict[tuple[int | None, ...], float] = {(None,) * len(nodes): 1.0}
    for parent in parents:
        own = sorted((node for node in nodes if node.parent is parent), key=lambda node: node.rank)
        longer = {}
        for tokens, before in found.items():
            law = models.q[tuple(tokens[node.number] for node in parent.path)].double()
            for drawn in permutations(range(V), len(own)):
                mass, left = before, law.clone()
                for token in drawn:
                    mass *= (left[token] / left.sum()).item() if left[token] > 0 else 0.0
                    left[token] = 0
                if mass > 0:
                    each = list(tokens)
                    for node, token in zip(own, drawn, strict=True):
                        each[node.number] = token
                    longer[tuple(each)] = mass
        found = longer
    return {tokens[1:]: mass for tokens, mass in found.items()}


class Trees:
    """All trees of a shape, and the distributions that their tokens come from and are judged by."""

    def __init__(self, models: Models, shape: TreeLength, tokens: Sequence[tuple[int, ...]]) -> None:
        self.shape, self.nodes, self.tokens = shape, nodes_of(shape), torch.tensor(tokens)
        said = [[tuple(one[own.number - 1] for own in node.path) for node in self.nodes] for one in tokens]
        self.p, self.q = (torch.stack([torch.stack([law[path] for path in each]) for each in said]) for law in models)

    def judge(self, index: Tensor, u: Tensor, params: SamplingParams, gumbel: Tensor | None = None) -> "Judged":
        """Judge the trees at `index` [A] by uniforms u [A, N]."""
        batch, shape, length = len(index), self.shape, self.shape.length
        p, q = self.p[index], self.q[index]
        tree = grown(shape, self.nodes, batch)
        beyond = torch.zeros(batch, MOST_BRANCHES, 2, dtype=u.dtype)
        beyond[:, : shape.beyond, 1] = u[:, length:]
        draw = torch.full((batch, 1), 0.5, dtype=torch.float64)
        rows = make_rows(1, 1, V, 1, "cpu")
        admit(rows, 0, [0], params, 0, V)
        rows.grow([shape.levels], [False])
        levels = tuple(Level(len(level), V) for level in shape.levels)
        plan = make_plan([params] * batch, length, branches=shape.beyond, levels=levels)
        verdict, seen = TreeVerdict(p.log(), length), []
        pick = acceptance.inverse_cdf
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(acceptance, "inverse_cdf", lambda weights, u: (seen.append(weights), pick(weights, u))[1])
            proposed = torch.full((batch,), length)
            proposal = Proposal(self.tokens[index], proposed, q[:, :length], None, tree, after=q)
            accept_tree(proposal, p.log(), rows, plan, Noise(gumbel, draw, u[:, :length], beyond), verdict)
        return Judged(verdict, seen[-1] if seen else p[:, 0])

    def thresholds(self, params: SamplingParams) -> Tensor:
        """The uniform up to which each node passes [A, N] if it comes to it, found by asking the code that runs."""
        count, size = self.tokens.shape
        index, node = torch.arange(count).repeat_interleave(size), torch.arange(size).repeat(count)
        before = torch.tensor([[other in own.path[:-1] for other in self.nodes[1:]] for own in self.nodes[1:]])
        u = torch.where(before[node], LEAST, HIGHEST).double()
        low, high = torch.zeros(len(index), dtype=torch.float64), torch.ones(len(index), dtype=torch.float64)
        for _ in range(50):
            middle = (low + high) / 2
            path = self.judge(index, u.scatter(1, node[:, None], middle[:, None]), params).path
            passed = (path == node[:, None] + 1).any(1)
            low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
        return torch.where(low < 2 * LEAST, 0.0, low).view(count, size)


class Judged:
    def __init__(self, verdict: TreeVerdict, weights: Tensor) -> None:
        self.path = verdict.path  # [A, K+1]
        self.accepted = verdict.accepted  # [A]
        self.tokens = verdict.tokens  # [A, K+1]
        self.weights = weights  # [A, V] of the next token


def grown(shape: TreeLength, nodes: Sequence[Node], batch: int) -> Tree:
    """A tree for each of so many rows, as a round grows it."""
    tree = Tree(batch, shape.length, 1, 0, torch.device("cpu"), shape.beyond)
    tree.begin()
    own = nodes[shape.length + 1 :]
    for depth in range(1, shape.length + 1):
        mine = torch.tensor([[node.depth == depth for node in own]]).expand(batch, -1)
        parents, ranks = (
            torch.tensor([each]).expand(batch, -1)
            for each in ([node.parent.number for node in own], [node.rank for node in own])
        )
        tree.grow(mine, parents, ranks, mine)
    tree.end_lines(torch.full((batch, 1), shape.length))
    return tree


def law_of_a_round(models: Models, shape: TreeLength, params: SamplingParams) -> tuple[Tensor, float]:
    """Return the joint of K + 1 tokens after a round, and how many proposals stand on average."""
    drawn = all_tokens(models, nodes_of(shape))
    every = Trees(models, shape, list(drawn))
    rows, masses, u = [], [], []
    for index, (first, chance) in enumerate(zip(drawn.values(), every.thresholds(params).tolist(), strict=True)):
        for mass, uniforms in verdicts(first, chance):
            rows.append(index)
            masses.append(mass)
            u.append(uniforms)
    judged = every.judge(torch.tensor(rows), torch.tensor(u, dtype=torch.float64), params)
    begun: Counter[tuple[int, ...]] = Counter()
    for tokens, mass, path, accepted, weights in zip(
        every.tokens[rows].tolist(),
        masses,
        judged.path.tolist(),
        judged.accepted.tolist(),
        judged.weights.double(),
        strict=True,
    ):
        stands = tuple(tokens[node - 1] for node in path[1 : accepted + 1])
        for token, share in enumerate((weights / weights.sum()).tolist()):
            begun[*stands, token] += mass * share
    law = torch.zeros(*[V] * (shape.length + 1), dtype=torch.float64)
    for tokens, mass in begun.items():
        law[tokens] += mass * models.target_after(tokens, shape.length + 1)
    standing = sum(mass * stands for mass, stands in zip(masses, judged.accepted.tolist(), strict=True))
    return law.flatten(), standing


def error(models: Models, shape: str, params: SamplingParams = REJECTION) -> float:
    law, _ = law_of_a_round(models, read(shape), params)
    return (law - models.target_after((), read(shape).length + 1).flatten()).abs().max().item()


@pytest.mark.parametrize("params", [REJECTION, TOKENWISE], ids=["rejection", "tokenwise"])
@pytest.mark.parametrize("shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.exhaustive) for shape in LONG)])
def test_what_a_round_on_a_tree_commits_is_distributed_as_the_targets(shape: str, params: SamplingParams):
    assert error(random_models(0, read(shape).length, torch.float64), shape, params) <= EXACT


def test_filters_that_leave_tokens_out_change_nothing_of_it():
    assert error(with_exclusions(random_models(1, 2, torch.float64)), "2/4") <= EXACT


@pytest.mark.parametrize("spread", [0.0, 12.0])
def test_equal_and_nearly_certain_distributions_are_no_exception(spread: float):
    models = random_models(3, 2, torch.float64, spread)
    assert error(models, "2x1") <= EXACT
    assert error(Models(models.p, models.p), "2x1") <= EXACT, "the draft is the target: the line stands"


def test_in_float32_only_rounding_differs():
    assert error(random_models(1, 2, torch.float32), "2/4") <= 2e-6


def test_each_branch_is_one_more_chance():
    models = random_models(0, 2, torch.float64)
    for params in (REJECTION, TOKENWISE):
        kept = [law_of_a_round(models, read(shape), params)[1] for shape in ("2/3", "2/4", "2/5")]
        assert kept == sorted(set(kept)), (
            "a sibling at the root, another behind the line, and one that follows the first"
        )


EXAMINE = trees.examine_children


@pytest.mark.parametrize(
    ("owner", "name", "careless", "shape"),
    [
        (combs, "without", lambda q, token: q, "2/5"),
        (trees, "examine_children", lambda law, *others: (EXAMINE(law, *others)[0], law), "2x1"),
        (Proposal, "children_of", lambda self, node: self.after[:, 0], "2x1"),
    ],
    ids=["what was tested stays in q", "the next token is drawn as if only the line had been tested", "q of the root"],
)
@pytest.mark.parametrize(
    "params",
    [REJECTION, pytest.param(TOKENWISE, marks=pytest.mark.exhaustive)],
    ids=["rejection", "tokenwise"],
)
def test_the_enumeration_sees_a_wrong_test(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams, owner: Any, name: str, careless: Any, shape: str
):
    monkeypatch.setattr(owner, name, careless)
    assert error(random_models(0, 2, torch.float64), shape, params) > 1e-4


def test_the_coupled_walk_is_the_targets_own_picks():
    """Whatever the tokens of the tree are, what stands and the next token are what the target picks by itself."""
    generator = torch.Generator().manual_seed(1)
    models, shape = random_models(5, 2, torch.float64), read("2x2")
    every = Trees(models, shape, list(all_tokens(models, nodes_of(shape))))
    batch, nodes = every.tokens.shape
    gumbel = torch.randn(1, shape.length + 1, V, generator=generator, dtype=torch.float64).expand(batch, -1, -1)
    u = torch.full((batch, nodes), 0.5, dtype=torch.float64)
    judged = every.judge(torch.arange(batch), u, COUPLED, gumbel.contiguous())
    text: tuple[int, ...] = ()
    for index in range(shape.length + 1):
        text += (int((models.p[text].log() + gumbel[0, index]).argmax()),)
    for accepted, found, proposed in zip(
        judged.accepted.tolist(), judged.tokens.tolist(), every.tokens.tolist(), strict=True
    ):
        assert tuple(found[: accepted + 1]) == text[: accepted + 1]
        paths = {tuple(proposed[own.number - 1] for own in node.path) for node in every.nodes}
        assert accepted == max(len(path) for path in paths if text[: len(path)] == path)
    assert set(judged.accepted.tolist()) == {0, 1, 2}


def test_children_are_drawn_from_what_is_left(monkeypatch: pytest.MonkeyPatch):
    weights: list[Tensor] = []
    draw = branches.inverse_cdf
    monkeypatch.setattr(branches, "inverse_cdf", lambda left, u: (weights.append(left.clone()), draw(left, u))[1])
    q = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.0, 0.5, 0.5, 0.0]]])
    found = branches.drawn_in_turn(q, torch.tensor([[3]]), torch.full((1, 2, 3), 0.7).double())
    assert found.tokens[0].tolist()[0] == [3, 2, 1], "the line's own before the others"
    assert found.tokens[0].tolist()[1][:2] == [2, 1]
    assert torch.equal(weights[1][0], torch.tensor([0.1, 0.2, 0.3, 0.0])), "without the line's token"
    assert (found.shares > 0).tolist() == [[[True] * 3, [True, True, False]]], "nothing is left of two tokens"


def test_no_child_stands_beside_itself_or_is_excluded():
    scores = torch.tensor([[[5.0, 5.0, 1.0, -torch.inf], [1.0, 2.0, -torch.inf, -torch.inf]]])
    for own in (0, 1):
        found = branches.nearly_picked(scores.clone(), torch.tensor([[own]]), 4)
        assert found.tokens[0, 0, :3].tolist() == [own, 1 - own, 2]
        assert found.tokens[0, 1, :2].tolist() == [1, 0]
        assert (found.shares > 0).tolist() == [[[True, True, True, False], [True, True, False, False]]]


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("3x2x1", [[(0, 1), (0, 2)], [(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)], [(node, 0) for node in range(1, 6)]]),
        ("1x2", [[], [(0, 1)]]),
        ("4/4", [[]] * 4),
        ("2/5", [[(0, 1)], [(0, 1), (1, 0)]]),
    ],
)
def test_a_shape_says_where_its_branches_are(text: str, levels: Levels):
    shape = TreeLength.read(text)
    assert [[tuple(branch) for branch in level] for level in shape.levels] == levels
    assert str(shape) == text
    assert shape.nodes == shape.length + sum(map(len, levels))


@pytest.mark.parametrize("text", ["16/64", "4/12", "8/56", "3/51"])
def test_the_likeliest_branches_follow_what_is_there(text: str):
    shape = TreeLength.read(text)
    assert sum(map(len, shape.levels)) == shape.beyond
    children: list[Counter[int]] = []
    for before, level in zip(((), *shape.levels), shape.levels, strict=False):
        assert len(set(level)) == len(level)
        assert all(branch.parent <= len(before) for branch in level)
        children.append(Counter(branch.parent for branch in level))
        for branch in level:  # those tested before it are there, too
            assert branch.rank < children[-1][branch.parent] + (branch.parent == 0)
