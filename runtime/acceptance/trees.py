"""The exact tests on combs, trees and several lines say which path of nodes stands and which token follows it.

coupled:   the target picks its token with the noise of the index; this token follows, whatever was proposed there.
rejection: the first line is judged by itself; behind it siblings and branches are tested as `combs.py` says, and other
           lines as `lines.py` says. tokenwise does the same.
lenience:  greedy rows take the longest path of tokens that are each likely enough; the others are tokenwise.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..state.indexing import at_nodes, counting, pick
from ..state.plan import Plan
from ..state.proposal import Noise, Proposal
from ..state.rows import Rows
from ..state.tree import Tree
from ..state.verdict import TreeVerdict, Verdict
from . import one_line as acceptance
from .combs import examine_children
from .lines import Walk, walk
from .one_line import judge, likely_enough, put_next


def accept(proposal: Proposal, scores: Tensor, rows: Rows, plan: Plan, noise: Noise, verdict: Verdict) -> None:
    """Judge what was proposed, a line or a tree, by the target's transformed `scores` of all nodes."""
    if isinstance(verdict, TreeVerdict):
        accept_tree(proposal, scores, rows, plan, noise, verdict)
    else:
        acceptance.accept(proposal, scores, rows, plan, noise, verdict)


def accept_tree(proposal: Proposal, scores: Tensor, rows: Rows, plan: Plan, noise: Noise, verdict: TreeVerdict) -> None:
    """Judge a tree by the target's transformed `scores` [A, N+1, V] at all of its nodes."""
    tree, tokens, k = proposal.tree, proposal.tokens, plan.draft_length
    assert tree is not None
    p = verdict.target_probabilities = scores.softmax(-1) if plan.probabilities else None
    more = (rows.siblings > 0) | (rows.lines > 1) | rows.has_tree  # than one line
    by_line = plan.draws or plan.lenient  # else each row picks its path itself, whatever its shape
    if by_line:  # first the first line, as if it were alone
        line = proposal._replace(tokens=tokens[:, :k])
        law = judge(line, scores[:, : k + 1], None if p is None else p[:, : k + 1], rows, plan, noise, verdict)
        put(None, straight(verdict.accepted, k), verdict)
        if law is not None:
            go_on(law, more & ~rows.coupled, proposal, rows, plan, noise, verdict)
    if plan.coupled:
        gumbel = None if noise.gumbel is None else at_nodes(noise.gumbel, tree.depths)
        verdict.picked.pick(scores, gumbel)
        passed = verdict.picked.tokens.gather(1, tree.parents) == tokens
        if plan.lenient:
            passed |= likely_enough(at_nodes(scores, tree.parents), tokens, rows)
        walked = more & rows.coupled if by_line else None
        put(walked, deepest(passed & tree.exists, tree, k), verdict)
        picked = verdict.picked.tokens.gather(1, verdict.path)
        if plan.lenient:  # what stands need not be what the target would have picked
            stands = counting(k, tokens.device) < verdict.accepted[:, None]
            picked[:, :k] = torch.where(stands, along(tokens, verdict), picked[:, :k])
        verdict.tokens.copy_(picked if walked is None else torch.where(walked[:, None], picked, verdict.tokens))
    count_proposed(proposal, tree, rows, verdict)


def go_on(
    law: Tensor, some: Tensor, proposal: Proposal, rows: Rows, plan: Plan, noise: Noise, verdict: TreeVerdict
) -> None:
    """Let `some` rows [A] go on where their first line ends and leaves a law [A, V] for the next token."""
    tree, p, k = proposal.tree, verdict.target_probabilities, plan.draft_length
    assert tree is not None
    assert p is not None
    law = law / law.sum(-1, keepdim=True)
    if plan.siblings or plan.branches:
        law = go_down(law, some & ((rows.siblings > 0) | rows.has_tree), proposal, rows, plan, noise, verdict)
    if plan.beside:
        several, block = rows.lines > 1, rows.block
        begin = Walk(
            torch.where(block, verdict.accepted, 0),
            torch.zeros_like(verdict.accepted),
            torch.where(block[:, None], law, p[:, 0]),
        )
        walked = walk(begin, some & several, p, proposal, tree, rows, plan, noise)
        law = torch.where(several[:, None], walked.law, law)
        nodes = straight(walked.accepted, k).nodes
        nodes = nodes + walked.line[:, None] * k * (nodes > 0)
        put(some & several, Path(walked.accepted, nodes), verdict)
    before = verdict.tokens.clone()
    put_next(law, along(proposal.tokens, verdict), rows, plan, noise, verdict)
    verdict.tokens.copy_(torch.where(some[:, None], verdict.tokens, before))


def go_down(
    law: Tensor, some: Tensor, proposal: Proposal, rows: Rows, plan: Plan, noise: Noise, verdict: TreeVerdict
) -> Tensor:
    """Let `some` rows [A] go on along siblings and branches; return the law [A, V] of the next token then."""
    tree, p, k = proposal.tree, verdict.target_probabilities, plan.draft_length
    assert tree is not None
    assert p is not None
    children, lenience = tree.children(), rows.lenience if plan.lenient else None
    parent, going = verdict.accepted.clone(), some & (verdict.accepted < proposal.proposed)
    for turn in range(max(1, len(plan.levels))):
        ranks = range(turn == 0, plan.children)  # the line's own has failed
        node, law = examine_children(law, children, parent, going, proposal, tree, ranks, noise, lenience)
        going = node > 0
        law = torch.where(going[:, None], pick(p, node), law)
        path = verdict.path.scatter(1, (verdict.next_index + 1).clamp_(max=k), node[:, None])
        put(going, Path(verdict.accepted + 1, path), verdict)
        if law.device.type == "cpu" and not bool(going.any()):
            break
        parent = node
    return law


class Path(NamedTuple):
    """The number of proposals that stand, and their nodes after the root's; 0 after the last."""

    accepted: Tensor  # [A]
    nodes: Tensor  # [A, K+1]


def straight(accepted: Tensor, k: int) -> Path:
    """Return the path along the first line, as far as it stands."""
    places = counting(k + 1, accepted.device)
    return Path(accepted, places * (places <= accepted[:, None]))


def deepest(passed: Tensor, tree: Tree, k: int) -> Path:
    """Return the path to the first of the deepest nodes that have passed [A, N] and whose ancestors all have."""
    falls = (tree.ancestors[:, :, 1:] & ~passed[:, None]).any(-1)  # [A, N+1]
    depth, last = tree.depths.masked_fill(falls, 0).max(1)
    own = pick(tree.ancestors, last)
    path = torch.zeros(len(passed), k + 1, dtype=torch.int64, device=passed.device)
    return Path(depth, path.scatter_(1, tree.depths * own, tree.nodes * own))


def put(rows: Tensor | None, path: Path, verdict: TreeVerdict) -> None:
    """Give this path to these rows [A], or to all."""
    accepted, nodes = path
    if rows is not None:
        accepted = torch.where(rows, accepted, verdict.accepted)
        nodes = torch.where(rows[:, None], nodes, verdict.path)
    verdict.accepted.copy_(accepted)
    verdict.path.copy_(nodes)
    verdict.last.copy_(verdict.path.gather(1, verdict.next_index)[:, 0])


def along(tokens: Tensor, verdict: TreeVerdict) -> Tensor:
    """Return the proposals [A, K] of the path, garbage behind the last."""
    return tokens.gather(1, (verdict.path[:, 1:] - 1).clamp_(min=0))


def count_proposed(proposal: Proposal, tree: Tree, rows: Rows, verdict: TreeVerdict) -> None:
    """Count the proposals of the only line, or of the longest that agrees with all that stands."""
    if tree.lines == 1:
        verdict.proposed.copy_(proposal.proposed)
        return
    assert proposal.counts is not None
    tokens = proposal.tokens[:, : tree.lines * tree.length].view(-1, tree.lines, tree.length)
    beyond = counting(tree.length, tokens.device) >= verdict.accepted[:, None]
    agrees = ((tokens == verdict.leading[:, None]) | beyond[:, None]).all(-1)
    longest = (proposal.counts * agrees).amax(1)
    verdict.proposed.copy_(torch.where(rows.lines > 1, longest, proposal.proposed))
