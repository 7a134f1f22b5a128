"""Grows trees level by level: the draft says what may follow each node, and each row takes as many as it asks for.

coupled:   the tokens that the draft would pick first, by its scores with the noise of their index. Rows that adapt take
           them where they are most likely to stand; the noise may choose tokens and places, because
           the target's own pick decides.
rejection: tokens drawn from q without replacement, a node's children one after another. Where they are is fixed before
           anything is drawn.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...engines import MAX_DRAFT_LENGTH
from ..acceptance.one_line import inverse_cdf
from ..state.frame import Frame
from ..state.indexing import counting
from ..state.noise import MOST_CHILDREN
from ..state.plan import Plan
from ..state.proposal import Noise
from ..state.rows import Rows
from ..state.shapes import EACH_FURTHER, STANDS


class Candidates(NamedTuple):
    """Tokens that may follow each node of a level, the line's own first, and the share that each is likely to have."""

    tokens: Tensor  # [A, P, R]
    shares: Tensor  # [A, P, R], 0 for none


class Growth:
    """The trees of one round, as far as they have grown."""

    def __init__(self, rows: Rows, plan: Plan, frame: Frame, noise: Noise) -> None:
        tree = frame.tree
        assert tree is not None
        self._rows, self._plan, self._frame, self._noise, self._tree = rows, plan, frame, noise, tree
        self._device = tree.nodes.device
        self._reached = torch.ones(plan.batch, 1, device=self._device)  # [A, P], how likely the nodes are to stand
        self._begin = torch.zeros(plan.batch, 1, dtype=torch.int64, device=self._device)  # branches so far
        self.after: Tensor | None = None  # q [A, N+1, V] of what follows each node
        if plan.probabilities:
            size = plan.batch, len(tree.nodes), frame.target_logits.shape[2]
            self.after = torch.zeros(*size, device=self._device)
        frame.input_ids[:, :1].copy_(frame.recent[:, -1:])
        for i, level in enumerate(frame.levels):
            level[:, 0] = i

    def grow(self, i: int, line: Tensor, scores: Tensor, q: Tensor | None) -> None:
        """Let tokens follow the nodes of level i, beside the line's own [A, 1].

        They are chosen by the draft's scores with noise, or by q, both [A, P, V].
        """
        rows, plan, frame, tree = self._rows, self._plan, self._frame, self._tree
        nodes, (count, children) = frame.levels[i], plan.levels[i]
        frame.proposed[:, i : i + 1].copy_(line)
        if self.after is not None:
            assert q is not None
            self.after.scatter_(1, nodes[:, :, None].expand_as(q), q)
        if not count:
            self._reached = self._reached[:, :1]  # nothing is compared with a line that stands alone
            return
        begin, end = self._begin, rows.levels[:, i + 1 : i + 2]
        numbers = counting(count, self._device)
        slots = begin + numbers  # [A, C], of all branches of a row
        fixed = rows.branches.gather(1, slots.clamp(max=rows.branches.shape[1] - 1)[:, :, None].expand(-1, -1, 2))
        index = fixed[:, :, 0] * children + fixed[:, :, 1]  # among the children of all nodes; 0: the line's own
        index = torch.where(slots < end, index, 0)
        found = self._candidates(line, scores, q, children, slots, index)
        worth = found.shares * self._reached[:, :, None]
        if plan.coupled:
            values, best = worth.flatten(1).index_fill(1, counting(1, self._device), -1.0).topk(count)
            index = torch.where(rows.adapts[:, None], best, index)
            end = torch.where(rows.adapts[:, None], self._end_of_best(i, values, worth[:, 0, :1]), end)
        own = slots < end
        reached = worth.flatten(1).gather(1, index) * own
        tokens = found.tokens.flatten(1).gather(1, index)
        parents = nodes.gather(1, index.div(children, rounding_mode="floor"))
        place = counting(plan.branches, self._device) - begin  # [A, B], of each branch on this level
        mine = (place >= 0) & (place < end - begin)
        place = place.clamp(0, count - 1)
        tree.grow(mine, parents.gather(1, place), (index % children).gather(1, place), (reached > 0).gather(1, place))
        frame.put_branches(mine, tokens.gather(1, place))
        self._reached, self._begin = torch.cat([worth[:, 0, :1], reached], 1), end
        if i + 1 < len(plan.levels):
            # Beyond a row's own are nodes of later levels, which nothing follows yet.
            frame.levels[i + 1][:, 1:] = (slots + plan.draft_length + 1).clamp_(max=len(tree.nodes) - 1)

    def _end_of_best(self, i: int, values: Tensor, line: Tensor) -> Tensor:
        """Return where this level ends among the branches [A, 1] of rows that adapt; `values` [A, C] rates its best.

        The level takes as many as are likelier to stand than what may follow on later levels, beside the line [A, 1].
        """
        rows = self._rows
        numbers, later = counting(values.shape[1], self._device), rows.depth[:, None] - (i + 1)
        depths, shares = siblings_of_a_line(self._device)
        worth = torch.where(depths < later, shares * line, 0.0)  # [A, F]
        better = (worth[:, None] > values[:, :, None]).sum(2)
        taken = (values > 0) & (numbers + 1 + better <= rows.levels[:, -1:] - self._begin)
        return self._begin + (taken & (later >= 0)).sum(1, keepdim=True)

    def _candidates(
        self, line: Tensor, scores: Tensor, q: Tensor | None, children: int, slots: Tensor, index: Tensor
    ) -> Candidates:
        plan, rows = self._plan, self._rows
        picked = nearly_picked(scores, line, children) if plan.coupled else None
        if not plan.draws:
            assert picked is not None
            return picked
        assert q is not None
        assert self._noise.beyond is not None
        draws = self._noise.beyond[..., 0]
        u = torch.zeros(len(q), q.shape[1] * children, dtype=draws.dtype, device=draws.device)
        u.scatter_(1, index, draws.gather(1, slots.clamp(max=draws.shape[1] - 1)))
        drawn = drawn_in_turn(q, line, u.view(len(q), -1, children))
        if picked is None:
            return drawn
        own = rows.coupled[:, None, None]
        return Candidates(*(torch.where(own, ours, others) for ours, others in zip(picked, drawn, strict=True)))


@cache
def siblings_of_a_line(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the depths [F] and how likely they are to stand [F] of all siblings that a line may have."""
    depth, rank = counting(MAX_DRAFT_LENGTH, device)[:, None], counting(MOST_CHILDREN, device)[1:]
    shares = STANDS**depth * (1 - STANDS) * EACH_FURTHER**rank
    return depth.expand_as(shares).flatten(), shares.flatten()


def nearly_picked(scores: Tensor, line: Tensor, children: int) -> Candidates:
    """Return the first picks after each node, as likely as the softmax of their scores says."""
    own = line[:, :, None]
    first, tokens = scores.topk(children)
    if children > 1:  # ties may be resolved otherwise than for the line
        others, beside = scores[:, :1].scatter(2, own, -torch.inf).topk(children - 1)
        first[:, :1, 1:], tokens[:, :1, 1:] = others, beside
    first[:, :1, :1], tokens[:, :1, :1] = scores[:, :1].gather(2, own), own
    return Candidates(tokens, first.softmax(-1))


def drawn_in_turn(q: Tensor, line: Tensor, u: Tensor) -> Candidates:
    """Draw children of each node from q [A, P, V] without replacement, by uniforms u [A, P, R]."""
    batch, width, vocab_size = q.shape
    left, tokens, exist = q, [], []
    for rank in range(u.shape[2]):
        token = inverse_cdf(left.flatten(0, 1), u[:, :, rank].reshape(-1, 1)).view(batch, width, 1)
        token.clamp_(max=vocab_size - 1)  # an empty rest and NaN logits lead beyond the vocabulary
        if rank == 0:
            token[:, :1] = line[:, :, None]
        tokens.append(token)
        exist.append(left.gather(2, token) > 0)
        left = left.scatter(2, token, 0.0)
    return Candidates(torch.cat(tokens, 2), torch.cat(exist, 2).to(q.dtype))
