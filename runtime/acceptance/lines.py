"""Tests several lines by chance: walks along those that agree with what stands, and tests their next tokens.

Each line was drawn from a q of its own, which knows nothing of the other lines. At each place the next tokens of the
remaining lines are tested in turn, each against what is left of p: accept x iff u·q(x) < p(x), else p ← norm(max(0,
p − q)). Lines whose token stands remain. Where none does, the next token comes from what is left of p.

tokenwise: from the first place on; in each round any line may be tested first. This is multi-step speculative sampling
           (SpecInfer, arXiv 2305.09781).
rejection: the first line is judged as a block; the others are tested from where it ends on, against what it leaves. So
           a round keeps at least what it would keep with the first line alone.
lenience:  tokenwise, with l·q in place of q; greedy requests take no test by chance.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..state.indexing import counting, pick
from ..state.plan import Plan
from ..state.proposal import Noise, Proposal
from ..state.rows import Rows
from ..state.tree import Tree
from .combs import what_is_left


class Walk(NamedTuple):
    """The progress of a round in each row: how many proposals stand, along which line, and what is left of p."""

    accepted: Tensor  # [A]
    line: Tensor  # [A]
    law: Tensor  # [A, V]


def walk(
    begin: Walk, some: Tensor, p: Tensor, proposal: Proposal, tree: Tree, rows: Rows, plan: Plan, noise: Noise
) -> Walk:
    """Let `some` rows [A] go on from where they begin, by p [A, N+1, V] after each node."""
    lines, length, counts = tree.lines, tree.length, proposal.counts
    assert counts is not None
    tokens = proposal.tokens[:, : lines * length].view(-1, lines, length)
    uniforms = [noise.to_test(line, length) for line in range(lines)]
    u = torch.stack([each for each in uniforms if each is not None], 1)
    order = an_order(lines, rows, noise)
    agree = (tokens == tokens[:, :1]).cumprod(2).sum(2)
    left = (agree >= begin.accepted[:, None]) & (counts > begin.accepted[:, None])  # [A, D]: they agree, and go on
    left[:, 0] &= ~rows.block  # the first line has been judged
    going = some
    accepted, line, law = begin
    for place in range(length + 1):
        begins, here = begin.accepted == place, pick(p, line * length + place) if place else p[:, 0]
        here = torch.where(begins[:, None], begin.law, here)
        asking = going & (begin.accepted <= place)
        stands = torch.zeros_like(going)
        if place < length:
            proposed = tokens[:, :, place]
            q = laws_at(place, proposal, proposed, p)
            if plan.lenient:
                q = q * rows.lenience[:, None, None]
            passed = torch.zeros_like(proposed[:, 0])
            for turn in order.unbind(1):
                token, drawn_from = pick(proposed, turn)[:, None], pick(q, turn)
                needed = pick(u[:, :, place], turn) * drawn_from.gather(1, token)[:, 0]
                asked = asking & ~stands & pick(left, turn)
                fair = asked & (needed < here.gather(1, token)[:, 0])
                here = torch.where((asked & ~fair)[:, None], what_is_left(here, drawn_from), here)
                passed = torch.where(fair, token[:, 0], passed)
                stands = stands | fair
            agrees = left & (proposed == passed[:, None])
            line = torch.where(stands, agrees.int().argmax(1), line)
            left = torch.where(asking[:, None], agrees & (counts > place + 1), left)
        law = torch.where(asking[:, None], here, law)
        accepted = accepted + stands
        going = going & (stands | ~asking)
        if p.device.type == "cpu" and not bool(going.any()):
            break
    return Walk(accepted, line, law)


def laws_at(place: int, proposal: Proposal, proposed: Tensor, p: Tensor) -> Tensor:
    """Return what the tokens [A, D] of a place were drawn from [A, D, V]."""
    q = [
        torch.zeros_like(p[:, 0]).scatter_(1, proposed[:, line, None], 1.0) if law is None else law[:, place]
        for line, law in enumerate(proposal.laws)
    ]
    return torch.stack(q, 1)


def an_order(lines: int, rows: Rows, noise: Noise) -> Tensor:
    """Return the order [A, D] in which lines are tested; any of a row's lines may come first."""
    assert noise.test is not None
    turn, own = counting(lines, rows.lines.device), rows.lines[:, None]
    first = (noise.test[:, -1:] * own).long()  # this uniform is that of the next token, which is not tested
    return torch.where(turn < own, (first + turn) % own, turn)
