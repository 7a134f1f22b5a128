"""The test of siblings by chance: those beside the first proposal of the line that does not stand.

They were drawn from q one after another without replacement, that proposal before them. Each is tested as a single one
is, against what the line and the siblings before it have left of p: accept x iff u·q(x) < p(x), else p ← norm(max(0,
p − q)), and x leaves q. Whatever the rule that judges the line: what it leaves depends on no token that does not stand.
"""

import torch
from torch import Tensor

from ..round.rows import pick
from ..round.tree import Tree
from .acceptance import NEGLIGIBLE, Noise, Proposal
from .noise import of_rank


def examine_siblings(
    law: Tensor, standing: Tensor, proposal: Proposal, tree: Tree, ranks: int, noise: Noise
) -> tuple[Tensor, Tensor]:
    """Test the siblings behind the line's first proposals, `standing` [A] of which stand, by what is left [A, V].

    Return the node [A] that stands, 0 where none does, and what is left then.
    """
    tokens, q = proposal.tokens, proposal.probabilities
    assert q is not None
    assert noise.beyond is not None
    place = standing.clamp(max=tree.length - 1)
    nodes, q = pick(tree.children(ranks), place), pick(q, place)  # [A, R+1], the line's own first; [A, V]
    found, failed = torch.zeros_like(standing), standing < proposal.proposed
    token = tokens.gather(1, (nodes[:, :1] - 1).clamp_(min=0))
    for rank in range(1, ranks + 1):
        q = without(q, token)
        node = nodes[:, rank]
        token = tokens.gather(1, (node[:, None] - 1).clamp_(min=0))
        u = noise.beyond[:, of_rank(rank, tree.length), 1].gather(1, place[:, None])
        asked = failed & (node > 0) & (found == 0)
        fair = asked & (u * q.gather(1, token) < law.gather(1, token))[:, 0]
        found = torch.where(fair, node, found)
        law = torch.where((asked & ~fair)[:, None], what_is_left(law, q), law)
    return found, law


def without(q: Tensor, token: Tensor) -> Tensor:
    """Return q [A, V] without a token [A, 1]."""
    q = q.scatter(1, token, 0.0)
    return q / q.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)


def what_is_left(p: Tensor, q: Tensor) -> Tensor:
    """Return norm(max(0, p − q)); if p equals q up to rounding, p decides."""
    left = (p - q).relu_().add_(p, alpha=NEGLIGIBLE)
    return left / left.sum(-1, keepdim=True)
