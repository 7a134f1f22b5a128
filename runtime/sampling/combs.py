"""The exact tests on a comb: walk down it, from the last committed token, while one of the next tokens stands.

coupled:   the target picks its token with the noise of the index; whatever was proposed there, this token follows.
rejection: of the tokens at a place, drawn from q one after another without replacement, each is tested as a single
           one is, against what is left of p: accept x iff u·q(x) < p(x), else p ← norm(max(0, p − q)), and x leaves q.
           Under this rule and tokenwise alike; only a row without siblings is judged as its rule says of lines.
"""

import torch
from torch import Tensor

from ..round.comb import Comb
from ..round.plan import Plan
from ..round.rows import Rows, counting, pick
from . import acceptance
from .acceptance import NEGLIGIBLE, Noise, Proposal, Verdict, Winners, inverse_cdf
from .noise import of_siblings


class CombVerdict(Verdict):
    """The outcome of a round whose proposals are a comb: the path of those that stand, and the token that follows."""

    def __init__(self, logits: Tensor, length: int) -> None:
        super().__init__(logits[:, : length + 1])
        batch, nodes, _ = logits.shape
        self.picked = Winners(logits, torch.zeros(batch, nodes, dtype=torch.int64, device=logits.device))
        self.path = torch.zeros(batch, length + 1, dtype=torch.int64, device=logits.device)  # nodes, 0 behind the last
        self.last = torch.zeros(batch, dtype=torch.int64, device=logits.device)

    def along(self, tensor: Tensor) -> Tensor:
        return at_nodes(tensor, self.path)


def accept(proposal: Proposal, scores: Tensor, rows: Rows, plan: Plan, noise: Noise, verdict: Verdict) -> None:
    """Judge what was proposed, a line or a comb, by the target's transformed `scores` of all nodes."""
    if isinstance(verdict, CombVerdict):
        accept_comb(proposal, scores, rows, plan, noise, verdict)
    else:
        acceptance.accept(proposal, scores, rows, plan, noise, verdict)


def accept_comb(proposal: Proposal, scores: Tensor, rows: Rows, plan: Plan, noise: Noise, verdict: CombVerdict) -> None:
    """Judge a comb by the target's transformed `scores` [A, K+M+1, V] at all of its nodes."""
    comb, tokens, k = proposal.comb, proposal.tokens, plan.draft_length
    assert comb is not None
    lines = None
    if plan.lines:
        line = proposal._replace(tokens=tokens[:, :k])
        acceptance.accept(line, scores[:, : k + 1], rows, plan, noise, verdict)
        lines = verdict.accepted.clone(), verdict.tokens.clone()
    p = verdict.target_probabilities = scores.softmax(-1) if plan.probabilities else None
    verdict.proposed.copy_(proposal.proposed)
    passed = rest = None
    if plan.coupled:
        verdict.picked.pick(scores, None if noise.gumbel is None else at_nodes(noise.gumbel, comb.depths))
        passed = verdict.picked.tokens.gather(1, comb.parents) == tokens
    if plan.draws:
        assert p is not None
        assert proposal.probabilities is not None
        assert noise.test is not None
        assert noise.siblings is not None
        uniforms = noise.test[:, :k], noise.siblings[..., 1]
        fair, rest = examine_children(p[:, :k], proposal.probabilities, comb, tokens, uniforms, plan.ranks)
        passed = fair if passed is None else torch.where(rows.coupled[:, None], passed, fair)
    assert passed is not None
    follow(passed & comb.exists, comb, verdict)
    if plan.coupled:
        torch.gather(verdict.picked.tokens, 1, verdict.path, out=verdict.tokens)
    if rest is not None:
        assert p is not None
        assert noise.draw is not None
        at_end = pick(p, verdict.last)
        beyond = (verdict.last >= k)[:, None]
        law = torch.where(beyond, at_end, pick(rest, verdict.last.clamp(max=k - 1)))
        drawn = inverse_cdf(law, noise.draw[:, -1:])
        own = tokens.gather(1, (verdict.path[:, 1:] - 1).clamp_(min=0))
        own = torch.cat([own, drawn], 1).scatter_(1, verdict.next_index, drawn)
        verdict.tokens.copy_(torch.where(rows.coupled[:, None], verdict.tokens, own) if plan.coupled else own)
    if lines is not None:
        put_lines(rows, lines, verdict)


def at_nodes(tensor: Tensor, index: Tensor) -> Tensor:
    """Return the tensor whose row a, node n is tensor[a, index[a, n]]."""
    batch, width = tensor.shape[:2]
    begins = counting(batch * width, tensor.device)[::width]
    return tensor.flatten(0, 1).index_select(0, (begins[:, None] + index).flatten()).view(*index.shape, -1)


def follow(passed: Tensor, comb: Comb, verdict: CombVerdict) -> None:
    """Find the path of the nodes that have passed and whose ancestors all have; siblings never both pass."""
    falls = (comb.ancestors[:, :, 1:] & ~passed[:, None]).any(-1)  # [A, N+1]
    depths = comb.depths.masked_fill(falls, 0)
    verdict.path.zero_().scatter_(1, depths, comb.nodes * ~falls)
    torch.amax(depths, 1, out=verdict.accepted)
    verdict.last.copy_(verdict.path.gather(1, verdict.next_index)[:, 0])


def examine_children(
    p: Tensor, q: Tensor, comb: Comb, tokens: Tensor, uniforms: tuple[Tensor, Tensor], ranks: int
) -> tuple[Tensor, Tensor]:
    """Test the tokens at each place in order; return which pass [A, N], and what is left of p [A, K, V] where none did.

    The uniforms are those of the line [A, K] and of the siblings [A, 3 · 16].
    """
    length = p.shape[1]
    children = comb.children(ranks)
    passed = torch.zeros(len(tokens), tokens.shape[1] + 1, dtype=torch.bool, device=p.device)
    taken = torch.zeros(children.shape[:2], dtype=torch.bool, device=p.device)
    for rank in range(ranks + 1):
        child = children[:, :, rank]
        exists = child > 0
        token = tokens.gather(1, (child - 1).clamp_(min=0))[:, :, None]
        u = uniforms[1][:, of_siblings(rank, length)] if rank else uniforms[0]
        fair = u * q.gather(2, token)[:, :, 0] < p.gather(2, token)[:, :, 0]
        fair = fair & exists & ~taken
        passed.scatter_(1, child, fair)
        taken = taken | fair
        left = (p - q).relu_().add_(p, alpha=NEGLIGIBLE)  # if p equals q up to rounding, p decides
        p = torch.where(exists[:, :, None], left / left.sum(-1, keepdim=True), p)
        if rank < ranks:
            q = q.scatter(2, token, 0.0)
            q = q / q.sum(-1, keepdim=True).clamp_(min=torch.finfo(q.dtype).tiny)
    return passed[:, 1:], p


def put_lines(rows: Rows, lines: tuple[Tensor, Tensor], verdict: CombVerdict) -> None:
    """Let rows without siblings be as their own rule has judged them."""
    accepted, tokens = lines
    line = rows.siblings == 0
    verdict.accepted.copy_(torch.where(line, accepted, verdict.accepted))
    verdict.last.copy_(torch.where(line, accepted, verdict.last))
    verdict.tokens.copy_(torch.where(line[:, None], tokens, verdict.tokens))
    places = counting(verdict.path.shape[1], tokens.device)
    straight = places * (places <= accepted[:, None])
    verdict.path.copy_(torch.where(line[:, None], straight, verdict.path))
