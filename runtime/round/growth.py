"""Places branches beside a line: the draft says what may follow each node, and each row takes as many as it asks for.

Branches that others may follow are placed level by level, and the draft reads them before it goes on. Leaves, which
nothing follows, are placed beside all of the line at once, when it is known.

coupled:   the tokens that the draft would pick first, by its scores with the noise of their index. Rows that adapt take
           them where they are most likely to be accepted; the noise may choose tokens and places,
           because the target's own pick decides.
rejection: tokens drawn from q without replacement, a node's children one after another. Where they are is fixed before
           anything is drawn.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...engines import MAX_DRAFT_LENGTH
from ..acceptance.sums import inverse_cdf
from ..state.frame import Frame
from ..state.indexing import counting
from ..state.plan import Level, Plan
from ..state.proposal import Noise
from ..state.rows import LEAVES, Rows
from ..state.shapes import EACH_FURTHER, MOST_CHILDREN, TAKEN
from ..state.tree import Tree


class Candidates(NamedTuple):
    """Tokens that may follow each node, those of the line first, and the share that each is likely to have."""

    tokens: Tensor  # [A, P, R]
    shares: Tensor  # [A, P, R], 0 for none


class Growth:
    """What grows beside a line while it is drawn: nothing."""

    distributions: Sequence[Tensor] = ()  # q [A, P - 1, V] of what follows branches, after those of lines

    def follow(self, i: int, line: Tensor, scores: Tensor, q: Tensor | None) -> None:
        """Let tokens follow the nodes of level i, beside the line's own [A, 1].

        They are chosen by the draft's scores with noise, or by q, both [A, P, V].
        """

    def end(self, proposed: Tensor, q: Tensor | None) -> None:
        """Place leaves beside the line of `proposed` [A] tokens, by q [A, K, V] or by the scores of its places."""


NOTHING_GROWS = Growth()


class Branches(Growth):
    """The branches of one round, as far as they are placed; each row has places for B of them, from 0 on."""

    distributions: list[Tensor]

    def __init__(self, rows: Rows, plan: Plan, frame: Frame, noise: Noise) -> None:
        tree = frame.nodes
        assert isinstance(tree, Tree)
        self._rows, self._plan, self._noise, self._tree = rows, plan, noise, tree
        self._line, self._branches = frame.lines[0], frame.branches
        self._device = tree.numbers.device
        self._places = counting(plan.branches, self._device)  # [B]
        self._scores: list[Tensor] = []  # [A, 1, V] each, by which leaves are chosen
        self.distributions = []
        self._first_distribution = sum(plan.have_distributions) * plan.draft_length
        if plan.levels:
            self._begin = torch.zeros(plan.batch, 1, dtype=torch.int64, device=self._device)  # branches so far
            self._reached = torch.ones(plan.batch, 1, device=self._device)  # [A, P], how likely each is accepted
            frame.input_ids[:, :1].copy_(frame.recent[:, -1:])
            for i, level in enumerate(self._line.levels):
                level[:, 0] = i

    def follow(self, i: int, line: Tensor, scores: Tensor, q: Tensor | None) -> None:
        plan, rows = self._plan, self._rows
        if plan.leaves.branches and plan.coupled:
            self._scores.append(scores[:, :1].clone())  # the next step may write over them
        if i >= len(plan.levels):
            return
        nodes, level = self._line.levels[i], plan.levels[i]
        distributions = numbers_of_distributions(i, self._first_distribution, nodes.shape[1], self._device)
        if q is not None and q.shape[1] > 1:
            self.distributions.append(q[:, 1:])
            self._first_distribution += q.shape[1] - 1
        self._line.proposed[:, i : i + 1].copy_(line)
        if not level.branches:
            self._reached = self._reached[:, :1]  # nothing is compared with a line that is alone
            return
        begin, end = self._begin, rows.begins[:, i + 1 : i + 2]
        index = self._fixed(level, begin, end)
        found = self._candidates(level, index, line, (scores[:, :1].clone(), scores[:, 1:]), q)
        worth = found.shares * self._reached[:, :, None]
        of_line, rated = worth[:, 0, :1], without_own(worth, line)
        if plan.coupled:
            values, best = rated.topk(level.branches)
            end = torch.where(rows.adapts[:, None], self._end_of_best(i, values, of_line), end)
            index = self._or_best(index, best, begin)
        reached = rated.gather(1, index)
        parent = index.div(level.children, rounding_mode="floor")
        self._place(
            begin, end, nodes.gather(1, parent), index % level.children, distributions[parent], reached, found, index
        )
        own = begin + counting(level.branches, self._device)  # [A, C], of this level
        here = own.clamp(max=plan.branches - 1)
        self._reached, self._begin = torch.cat([of_line, reached.gather(1, here) * (own < end)], 1), end
        if i + 1 < len(plan.levels):
            # After a row's own come some of later levels.
            self._line.levels[i + 1][:, 1:] = here + (plan.draft_length + 1)

    def end(self, proposed: Tensor, q: Tensor | None) -> None:
        plan, level = self._plan, self._plan.leaves
        if not level.branches:
            return
        line = torch.cat([one.tokens for one in self._line.winners], 1)
        begin, end = (self._rows.begins[:, place : place + 1] for place in (LEAVES, LEAVES + 1))
        index = self._fixed(level, begin, end)
        found = self._candidates(level, index, line, (all_k(self._scores, plan), None), q)
        reached = found.shares[:, :, 0].cumprod(1).roll(1, 1)
        reached[:, 0] = 1
        reached.mul_(counting(plan.draft_length, self._device) < proposed[:, None])
        rated = without_own(found.shares * reached[:, :, None], line)
        if plan.coupled:
            index = self._or_best(index, rated.topk(level.branches).indices, begin)
        parent = index.div(level.children, rounding_mode="floor")
        self._place(begin, end, parent, index % level.children, parent, rated.gather(1, index), found, index)

    def _fixed(self, level: Level, begin: Tensor, end: Tensor) -> Tensor:
        """Return which of all children of its nodes each branch of a level is [A, B], where that is fixed."""
        fixed = self._rows.branches[:, : self._plan.branches]
        mine = (self._places >= begin) & (self._places < end)
        return torch.where(mine, fixed[:, :, 0] * level.children + fixed[:, :, 1], 0)

    def _or_best(self, fixed: Tensor, best: Tensor, begin: Tensor) -> Tensor:
        """Return the same for rows that adapt, too, which take the best [A, C] from `begin` [A, 1] on."""
        if self._plan.levels:  # else all rows begin with the first
            best = best.gather(1, (self._places - begin).clamp_(0, best.shape[1] - 1))
        return torch.where(self._rows.adapts[:, None], best, fixed)

    def _place(
        self,
        begin: Tensor,
        end: Tensor,
        parents: Tensor,
        turns: Tensor,
        distributions: Tensor,
        worth: Tensor,
        found: Candidates,
        index: Tensor,
    ) -> None:
        """Let a row's branches from `begin` to `end` [A, 1] follow these nodes [A, B], if they are worth anything."""
        mine = (self._places >= begin) & (self._places < end)
        self._tree.place(mine, parents, turns, distributions, worth > 0)
        tokens, branches = found.tokens.flatten(1).gather(1, index), self._branches
        torch.where(mine, tokens, branches, out=branches)

    def _end_of_best(self, i: int, values: Tensor, line: Tensor) -> Tensor:
        """Return where this level ends among the branches [A, 1] of rows that adapt; `values` [A, C] rates its best.

        The level takes what is likelier accepted than what may follow on later levels, beside the line [A, 1].
        """
        rows = self._rows
        numbers, later = counting(values.shape[1], self._device), rows.depth[:, None] - (i + 1)
        depths, shares = beside_a_line(self._device)
        worth = torch.where(depths < later, shares * line, 0.0)  # [A, F]
        better = (worth[:, None] > values[:, :, None]).sum(2)
        taken = (values > 0) & (numbers + 1 + better <= rows.begins[:, -1:] - self._begin)
        return self._begin + (taken & (later >= 0)).sum(1, keepdim=True)

    def _candidates(
        self, level: Level, index: Tensor, line: Tensor, scores: tuple[Tensor | None, Tensor | None], q: Tensor | None
    ) -> Candidates:
        """Return what may follow each node, by the scores of the line's nodes and of others, or by q of all."""
        plan, rows = self._plan, self._rows
        picked = None
        if plan.coupled:
            own, others = scores
            assert own is not None
            picked = nearly_picked(own, line, others, level.children)
        if not plan.draws:
            assert picked is not None
            return picked
        assert q is not None
        assert self._noise.beyond is not None
        draws = self._noise.beyond[:, : plan.branches, 0]
        u = torch.zeros(len(q), q.shape[1] * level.children, dtype=draws.dtype, device=draws.device)
        drawn = drawn_in_turn(q, line, u.scatter_(1, index, draws).view(len(q), -1, level.children))
        if picked is None:
            return drawn
        coupled = rows.coupled[:, None, None]
        return Candidates(*(torch.where(coupled, ours, others) for ours, others in zip(picked, drawn, strict=True)))


def without_own(worth: Tensor, line: Tensor) -> Tensor:
    """Return what all children [A, P, R] are worth, the line's own [A, W] nothing, as [A, P · R]."""
    own = counting(line.shape[1], worth.device) * worth.shape[2]
    return worth.flatten(1).index_fill(1, own, 0.0)


@cache
def numbers_of_distributions(line: int, first: int, count: int, device: torch.device) -> Tensor:
    """Return which distribution draws what follows each node of a level: that of the line's place, or its own."""
    numbers = counting(count, device) + (first - 1)
    numbers[:1] = line
    return numbers


@cache
def beside_a_line(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the depths of all leaves that a line may have [F], and how likely each is to be accepted [F]."""
    depth, rank = counting(MAX_DRAFT_LENGTH, device)[:, None], counting(MOST_CHILDREN, device)[1:]
    shares = TAKEN**depth * (1 - TAKEN) * EACH_FURTHER**rank
    return depth.expand_as(shares).flatten(), shares.flatten()


def nearly_picked(scores: Tensor, line: Tensor, others: Tensor | None, children: int) -> Candidates:
    """Return the first picks after each node, as likely as the softmax of their scores says.

    Those after the line's nodes are its own tokens [A, W] and the runners-up by `scores` [A, W, V], which are used up;
    ties may be resolved otherwise than for the line.
    """
    own = line[:, :, None]
    values, tokens = [scores.gather(2, own)], [own]
    if children > 1:
        beside = scores.scatter_(2, own, -torch.inf).topk(children - 1)
        values.append(beside.values)
        tokens.append(beside.indices)
    first, picked = torch.cat(values, 2), torch.cat(tokens, 2)
    if others is not None and others.shape[1]:
        best = others.topk(children)
        first, picked = torch.cat([first, best.values], 1), torch.cat([picked, best.indices], 1)
    return Candidates(picked, first.softmax(-1))


def drawn_in_turn(q: Tensor, line: Tensor, u: Tensor) -> Candidates:
    """Draw children of each node from q [A, P, V] without replacement, by uniforms u [A, P, R].

    The first after the first nodes are the line's own [A, W].
    """
    batch, nodes, vocab_size = q.shape
    width, left, tokens, exist = line.shape[1], q, [], []
    for rank in range(u.shape[2]):
        if rank or nodes > width:
            token = inverse_cdf(left.flatten(0, 1), u[:, :, rank].reshape(-1, 1)).view(batch, nodes, 1)
            token.clamp_(max=vocab_size - 1)  # an empty rest and NaN logits lead beyond the vocabulary
            if not rank:
                token[:, :width] = line[:, :, None]
        else:
            token = line[:, :, None]
        tokens.append(token)
        exist.append(left.gather(2, token) > 0)
        left = left.scatter(2, token, 0.0)
    return Candidates(torch.cat(tokens, 2), torch.cat(exist, 2).to(q.dtype))


def all_k(parts: list[Tensor], plan: Plan) -> Tensor | None:
    """Join the parts [A, 1, …] of K proposals; those never drawn are ones, which nothing reads."""
    missing = plan.draft_length - len(parts)
    return torch.cat(parts + [torch.ones_like(parts[0])] * missing, 1) if parts else None
