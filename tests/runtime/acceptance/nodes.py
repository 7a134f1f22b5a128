"""Enumerates what a round on any nodes commits, by the code that runs: all tokens, all verdicts."""

from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.acceptance import accept as accepting
from trt_spec.runtime.acceptance.seat import admit, make_rows
from trt_spec.runtime.state.line import Line
from trt_spec.runtime.state.plan import Level
from trt_spec.runtime.state.proposal import Exam, Noise, Proposal
from trt_spec.runtime.state.shapes import LINE, Shape, comb, line, read_shape
from trt_spec.runtime.state.tree import Tree
from trt_spec.runtime.state.verdict import Verdict

from ..states import GIVEN, make_plan
from .distributions import Distribution, Models, V, random_models, verdicts

LEAST, HIGHEST = 2.0**-49, 1 - 2.0**-49
Tokens = tuple[int, ...]


class Node:
    """A token that is proposed: the node that it follows, which draft it is drawn from, and its turn."""

    def __init__(self, number: int, parent: "Node | None", drafter: int, turn: int) -> None:
        self.number, self.parent, self.drafter, self.turn = number, parent, drafter, turn
        self.path: list[Node] = [] if parent is None else [*parent.path, self]
        self.depth = len(self.path)

    def said(self, tokens: Sequence[int]) -> Tokens:
        """What its path says, of the tokens of all nodes."""
        return tuple(tokens[each.number - 1] for each in self.path)


def nodes_of(shape: Shape, lines: int = 1) -> list[Node]:
    """The root, the line, and the branches of a shape or so many lines beside it."""
    found = [Node(0, None, 0, 0)]
    for drafter in range(lines):
        last = found[0]
        for _ in range(shape.length):
            last = Node(len(found), last, drafter, drafter)
            found.append(last)
    first = found[: shape.length + 1]
    before = first[:1]
    for depth, level in enumerate(shape.levels, 1):
        before = first if shape.leaves else before
        own = [Node(len(found) + i, before[branch.parent], 0, branch.rank) for i, branch in enumerate(level)]
        found += own
        before = [*first[depth : depth + 1], *own]
    return found


class Round(NamedTuple):
    """What is proposed in a round, and the distributions that it comes from and is judged by."""

    target: Distribution
    drafts: tuple[Distribution | None, ...]  # of each line; None is always sure of the token of its number
    nodes: list[Node]
    k: int

    @property
    def branches(self) -> int:
        return len(self.nodes) - 1 - self.k if len(self.drafts) == 1 else 0

    def q(self, drafter: int, path: Tokens) -> Tensor:
        distribution = self.drafts[drafter]
        return torch.eye(V, dtype=torch.float64)[drafter] if distribution is None else distribution[path]

    def all_tokens(self) -> dict[Tokens, float]:
        """All tokens, node by node, with the probability that the drafts draw them: siblings without replacement."""
        families: dict[tuple[int, int], list[Node]] = {}
        for node in sorted(self.nodes[1:], key=lambda node: (node.depth, node.turn)):
            assert node.parent is not None
            families.setdefault((node.parent.number, node.drafter), []).append(node)
        found: dict[tuple[int | None, ...], float] = {(None,) * (len(self.nodes) - 1): 1.0}
        for own in families.values():
            longer = {}
            for tokens, before in found.items():
                distribution = self.q(own[0].drafter, own[0].parent.said(tokens)).double()
                for drawn in permutations(range(V), len(own)):
                    mass, left = before, distribution.clone()
                    for token in drawn:
                        mass *= (left[token] / left.sum()).item() if left[token] > 0 else 0.0
                        left[token] = 0
                    if mass > 0:
                        each = list(tokens)
                        for node, token in zip(own, drawn, strict=True):
                            each[node.number - 1] = token
                        longer[tuple(each)] = mass
            found = longer
        return found


def of_shape(models: Models, shape: Shape) -> Round:
    return Round(models.p, (models.q,), nodes_of(shape), shape.length)


def of_lines(target: Distribution, drafts: Sequence[Distribution | None], k: int) -> Round:
    return Round(target, tuple(drafts), nodes_of(line(k), len(drafts)), k)


def shaped(text: str) -> Shape:
    return read_shape(text) or line(int(text))


def uneven(length: int, *places: int) -> Shape:
    """A comb with so many leaves beside each token of its line, wherever they are likely."""

    class Uneven(Shape):
        levels = (
            tuple(
                type(comb(1, 1).levels[0][0])(place, rank + 1)
                for place, count in enumerate(places)
                for rank in range(count)
            ),
        )

    return Uneven(f"{length} {places}", length, sum(places), leaves=True, fixed=True)


class Judged(NamedTuple):
    path: Tensor  # [A, K+1]
    accepted: Tensor  # [A]
    proposed: Tensor  # [A]
    tokens: Tensor  # [A, K+1]
    weights: Tensor  # [A, V] of the next token


class Every:
    """All tokens of a round, and how they are judged."""

    def __init__(self, of: Round, lengths: Sequence[int] | None = None) -> None:
        self.of, self.lengths = of, lengths or [of.k] * len(of.drafts)
        self.drawn = of.all_tokens()
        self.tokens = torch.tensor(list(self.drawn))  # [N, nodes]
        said = [[node.said(one) for node in of.nodes] for one in self.drawn]
        self.said = said
        self.p = torch.stack([torch.stack([of.target[path] for path in each]) for each in said])
        lines = [
            torch.stack(
                [
                    torch.stack([of.q(drafter, each[node.parent.number]) for node in self._line(drafter)])
                    for each in said
                ]
            )
            for drafter, distribution in enumerate(of.drafts)
            if distribution is not None
        ]
        if of.branches:  # what follows any node
            lines.append(torch.stack([torch.stack([of.drafts[0][path] for path in each]) for each in said]))
        self.distributions = torch.cat(lines, 1) if lines else None

    def _line(self, drafter: int) -> list[Node]:
        return self.of.nodes[1 + drafter * self.of.k : 1 + (drafter + 1) * self.of.k]

    def judge(self, index: Tensor, u: Tensor, params: SamplingParams, gumbel: Tensor | None = None) -> Judged:
        """Judge the tokens at `index` [A] by uniforms u [A, N]."""
        of, batch, p = self.of, len(index), self.p[index]
        beyond = torch.zeros(batch, 3 * (LINE - 1), 2, dtype=u.dtype)
        nodes = self._tree(batch, u, beyond) if len(of.nodes) > of.k + 1 else Line()
        rows = make_rows(1, 1, V, 1, "cpu")
        admit(rows, 0, [0], params, 0, V)
        rows.more.fill_(True)
        fields = {"branches": of.branches, "levels": (Level(1, V),) * of.k} if of.branches else {}
        plan = make_plan([params] * batch, of.k, lines=((GIVEN,),) * len(of.drafts), ragged=True, **fields)
        distributions = None if self.distributions is None else self.distributions[index]
        first = None if of.drafts[0] is None else distributions[:, : of.k]
        proposed = torch.full((batch,), self.lengths[0])
        proposal = Proposal(self.tokens[index], proposed, first, None, nodes, distributions)
        verdict, seen, pick = Verdict(p.log(), of.k), [], accepting.inverse_cdf
        noise = Noise(gumbel, torch.full((batch, 1), 0.5, dtype=torch.float64), u[:, : of.k], beyond)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accepting, "inverse_cdf", lambda weights, u: (seen.append(weights), pick(weights, u))[1])
            accepting.accept(Exam(proposal, p.log(), rows, plan, noise, verdict))
        assert torch.equal(verdict.last, verdict.path.gather(1, verdict.accepted[:, None])[:, 0])
        weights = seen[-1] if seen else p[:, 0]
        return Judged(verdict.path, verdict.accepted, verdict.proposed, verdict.tokens, weights)

    def _tree(self, batch: int, u: Tensor, beyond: Tensor) -> Tree:
        """Place what is beside the first line, and put its uniforms where a round has them."""
        of = self.of
        has = [distribution is not None for distribution in of.drafts]
        tree = Tree(batch, of.k, has, of.branches, torch.device("cpu"))
        tree.begin()
        for depth in range(1, of.k + 1):
            own = of.nodes[of.k + 1 :][: of.branches]
            if own:
                mine = torch.tensor([[node.depth == depth for node in own]]).expand(batch, -1)
                parents, turns = (
                    torch.tensor([each]).expand(batch, -1)
                    for each in ([node.parent.number for node in own], [node.turn for node in own])
                )
                tree.place(mine, parents, turns, torch.where(parents < of.k, parents, of.k + parents), mine)
        for number, length in enumerate(self.lengths):
            tree.end_line(number, torch.full((batch,), length))
        beyond[:, :, 1].scatter_(1, tree.uniforms[:, of.k :], u[:, of.k :])
        return tree

    def standing(self, index: Sequence[int], judged: Judged) -> list[Tokens]:
        """What stands of each, which is what the nodes of its path say."""
        ends = judged.path.gather(1, judged.accepted[:, None])[:, 0].tolist()
        found = [self.said[one][end] for one, end in zip(index, ends, strict=True)]
        committed = zip(judged.tokens.tolist(), judged.accepted.tolist(), strict=True)
        assert found == [tuple(tokens[:accepted]) for tokens, accepted in committed]
        return found

    def thresholds(self, params: SamplingParams) -> Tensor:
        """The uniform up to which each node passes [N, nodes] if it comes to it, found by asking the code that runs."""
        count, size = self.tokens.shape
        index, node = torch.arange(count).repeat_interleave(size), torch.arange(size).repeat(count)
        before = torch.tensor(  # all that says the same up to there passes where it can
            [
                [len(end) < len(at) and at[: len(end)] == end for end in said[1:]]
                for said in self.said
                for at in said[1:]
            ]
        )
        u = torch.where(before, LEAST, HIGHEST).double()
        low, high = torch.zeros(len(index), dtype=torch.float64), torch.ones(len(index), dtype=torch.float64)
        for _ in range(50):
            middle = (low + high) / 2
            judged = self.judge(index, u.scatter(1, node[:, None], middle[:, None]), params)
            passed = torch.tensor(
                [
                    stood[: len(own)] == own
                    for stood, own in zip(
                        self.standing(index.tolist(), judged),
                        (self.said[one][at + 1] for one, at in zip(index.tolist(), node.tolist(), strict=True)),
                        strict=True,
                    )
                ]
            )
            low, high = torch.where(passed, middle, low), torch.where(passed, high, middle)
        return torch.where(low < 2 * LEAST, 0.0, low).view(count, size)


def distribution_of_a_round(
    of: Round, params: SamplingParams, lengths: Sequence[int] | None = None
) -> tuple[Tensor, float]:
    """Return the joint of K + 1 tokens after a round, and how many proposals stand on average."""
    every = Every(of, lengths)
    rows, masses, u = [], [], []
    for index, (first, chance) in enumerate(zip(every.drawn.values(), every.thresholds(params).tolist(), strict=True)):
        for mass, uniforms in verdicts(first, chance):
            rows.append(index)
            masses.append(mass)
            u.append(uniforms)
    judged = every.judge(torch.tensor(rows), torch.tensor(u, dtype=torch.float64), params)
    stands = every.standing(rows, judged)
    begun: Counter[Tokens] = Counter()
    shares = (judged.weights.double() / judged.weights.double().sum(1, keepdim=True)).tolist()
    for own, mass, each in zip(stands, masses, shares, strict=True):
        for token, share in enumerate(each):
            begun[*own, token] += mass * share
    distribution = torch.zeros(*[V] * (of.k + 1), dtype=torch.float64)
    models = Models(of.target, of.target)
    for tokens, mass in begun.items():
        distribution[tokens] += mass * models.target_after(tokens, of.k + 1)
    return distribution.flatten(), sum(mass * len(own) for mass, own in zip(masses, stands, strict=True))


def error(of: Round, params: SamplingParams, lengths: Sequence[int] | None = None) -> float:
    distribution, _ = distribution_of_a_round(of, params, lengths)
    return (distribution - Models(of.target, of.target).target_after((), of.k + 1).flatten()).abs().max().item()


def some_round(text: str, seed: int = 1, dtype: torch.dtype = torch.float64) -> Round:
    """A round of random models: a shape such as 2/4, or lines: "2 drafts, 1 copy of 2"."""
    if "of" not in text:
        shape = shaped(text)
        return of_shape(random_models(seed, shape.length, dtype), shape)
    drafts, copies, k = (int(word) for word in text.split() if word.isdigit())
    models = [random_models(10 * seed + i, k, dtype) for i in range(drafts + 1)]
    return of_lines(models[0].p, [*(one.q for one in models[1:]), *[None] * copies], k)
