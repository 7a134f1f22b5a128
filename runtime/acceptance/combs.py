"""Tests siblings and other branches by chance, behind the last proposal of the line that stands.

The children of a node were drawn from q one after another without replacement, the line's own before the others. Each
is tested as a single proposal is, against what those before it have left of p: accept x iff u·q(x) < p(x), else p ←
norm(max(0, p − q)), and x leaves q. Behind one that stands its own children are tested in the same way. This is exact
whichever rule judges the line, because what it leaves depends on no token that does not stand. Under lenience l each is
tested with l·q, as those of the line are.
"""

import torch
from torch import Tensor

from ..state.indexing import pick
from ..state.proposal import Noise, Proposal
from ..state.tree import Tree
from .one_line import NEGLIGIBLE


def examine_children(
    law: Tensor,
    children: Tensor,
    parent: Tensor,
    asked: Tensor,
    proposal: Proposal,
    tree: Tree,
    ranks: range,
    noise: Noise,
    lenience: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Test the `children` [A, N+1, R] of a node [A] in the rows `asked` [A], by what is left of p [A, V].

    Children before `ranks` have failed. Return the node [A] that stands, 0 where none does, and what is left then. Each
    q is weighted by `lenience` [A], or by 1 without it.
    """
    assert noise.beyond is not None
    nodes, q = pick(children, parent), proposal.children_of(parent)  # [A, R]; [A, V]
    tokens = proposal.tokens.gather(1, (nodes - 1).clamp_(min=0))
    behind = (nodes - 1 - tree.length).clamp_(min=0)  # those of the line come first, but are not tested here
    u = noise.beyond[..., 1].gather(1, tree.uniforms.gather(1, behind))
    found = torch.zeros_like(parent)
    for rank in range(ranks.stop):
        token = tokens[:, rank : rank + 1]
        if rank in ranks:
            tested = q if lenience is None else q * lenience[:, None]
            going = asked & (nodes[:, rank] > 0) & (found == 0)
            fair = going & (u[:, rank : rank + 1] * tested.gather(1, token) < law.gather(1, token))[:, 0]
            found = torch.where(fair, nodes[:, rank], found)
            law = torch.where((going & ~fair)[:, None], what_is_left(law, tested), law)
        if rank + 1 in ranks:
            q = without(q, token)
    return found, law


def without(q: Tensor, token: Tensor) -> Tensor:
    """Return q [A, V] without a token [A, 1]."""
    q = q.scatter(1, token, 0.0)
    return q / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def what_is_left(p: Tensor, q: Tensor) -> Tensor:
    """Return norm(max(0, p − q)); if p equals q up to rounding, p decides."""
    left = (p - q).relu_().add_(p, alpha=NEGLIGIBLE)
    return left / left.sum(-1, keepdim=True)
