"""Continues below the node where the first line was rejected: tests what else was proposed there, and what follows.

State: the nodes that spell the accepted tokens, and the residual r from which the next token is drawn. What follows
these nodes is tested in turn: accept x iff u·q(x) < r(x), else r ← norm(max(0, r − q)). A token that was drawn without
replacement has the q of its elder siblings without their tokens; a certain one has q = 1. Once x is accepted, the state
is all nodes that spell x there, and p. If none is accepted, the next token is drawn from r.

This is exact, because each proposal's distribution depends only on accepted tokens and on elder siblings of the same
drafter, and the uniform that tests it on nothing else. It contains recursive rejection (one drafter), SpecInfer's
multi-step sampling (arXiv 2305.09781: several), and copies. The first line is not tested again: its rule, whichever it
was, has looked at all of it and leaves the r with which this begins. Under lenience l each is tested with l·q.
"""

import torch
from torch import Tensor

from ..state.indexing import pick
from ..state.place import on_host
from ..state.proposal import Exam
from ..state.tree import CERTAIN, Tree
from .sums import NEGLIGIBLE


def descend(residual: Tensor, going: Tensor, tree: Tree, exam: Exam) -> Tensor:
    """Let the rows that are `going` [A] go on from their residual [A, V]; return that of their next token."""
    proposal, _, rows, plan, noise, verdict, p = exam
    tokens, k = proposal.tokens, plan.draft_length
    assert p is not None
    assert noise.beyond is not None
    uniforms = noise.beyond[..., 1].gather(1, tree.uniforms)
    here = tree.at_first_rejection(tokens, verdict)
    for step in range(plan.deepest):
        nodes = tree.following(here, plan.turns)  # [A, T]
        places = (nodes - 1).clamp_(min=0)
        said, drawn_from, u = (each.gather(1, places) for each in (tokens, tree.distributions, uniforms))
        asked = (nodes > k) & going[:, None]
        if plan.branches and tree.lines > 1:  # else all that follows is of one drafter, or each of its own
            alike = (drawn_from[:, 1:] == drawn_from[:, :-1]) & (drawn_from[:, 1:] != CERTAIN)
            siblings = alike & (nodes[:, :-1] > 0)
        taken, q = torch.zeros_like(verdict.accepted), residual
        for turn in range(plan.turns):
            token, elder = said[:, turn : turn + 1], q
            if not turn or tree.lines > 1:
                q = proposal.drawn_from(drawn_from[:, turn], token, residual.shape[1])
            if turn and plan.branches:
                rest = without(elder, said[:, turn - 1 : turn])
                q = rest if tree.lines == 1 else torch.where(siblings[:, turn - 1, None], rest, q)
            if not turn and (not step or not plan.branches):
                continue  # that is the first line's own
            tested = q * rows.lenience[:, None] if plan.lenient else q
            able = asked[:, turn] & (taken == 0)
            fair = able & (u[:, turn : turn + 1] * tested.gather(1, token) < residual.gather(1, token))[:, 0]
            taken = torch.where(fair, nodes[:, turn], taken)
            residual = torch.where((able & ~fair)[:, None], what_is_left(residual, tested), residual)
        going = taken > 0
        residual = torch.where(going[:, None], pick(p, taken), residual)
        path = verdict.path.scatter(1, (verdict.next_index + 1).clamp_(max=k), taken[:, None])
        verdict.put(going, verdict.accepted + 1, path)
        if step + 1 == plan.deepest or (on_host(residual.device) and not bool(going.any())):
            break
        passed = tokens.gather(1, (taken - 1).clamp_(min=0)[:, None])
        same = (said == passed) & asked & going[:, None]
        here = torch.zeros_like(here).scatter_(1, nodes * same, same)
        here[:, 0] = False
    return residual


def without(q: Tensor, token: Tensor) -> Tensor:
    """Return q [A, V] without a token [A, 1]."""
    q = q.scatter(1, token, 0.0)
    return q / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def what_is_left(p: Tensor, q: Tensor) -> Tensor:
    """Return norm(max(0, p − q)); if p equals q up to rounding, p decides."""
    left = (p - q).relu_().add_(p, alpha=NEGLIGIBLE)
    return left / left.sum(-1, keepdim=True)
