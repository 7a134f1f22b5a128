"""Three exact tests say which of a round's proposals are accepted, and which token follows them. Torch alone, no sync.

rejection: judge a first line together, as `block_verification.py` says; it never keeps fewer than tokenwise.
tokenwise: accept d of a first line iff u·q(d) < p(d), else draw from norm(max(0, p − q)).
coupled:   target and draft pick argmax(score + the same noise); accept the longest path that agrees. Greedy: no noise.

Where a rule that draws rejects a first line, `descent.py` goes on with what is beside it.

Lenience l < 1 is tokenwise and replaces q by l·q, so that more is accepted, and lets greedy rows keep a token at least
l times as likely as the best one. The loss is bounded: acceptance gives a token min(q, p/l), and the residual adds
R·max(0, p − l·q) / (1 − l + l·R) where R = 1 − Σ min(q, p/l), and since l·R ≤ 1 − l + l·R their sum is at most p/l.
If a sibling or another line is tested in the same way by what is left, the second part may become 1/l times as much; it
still is at most p/l − q, since R ≤ 1 − l + l·R.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ..state.indexing import chosen, counting, pick
from ..state.proposal import Exam, Proposal
from ..state.rows import Rows
from ..state.tree import Tree
from ..state.verdict import Verdict
from .block_verification import Chances, judge_jointly, share_of_q
from .descent import descend
from .sums import NEGLIGIBLE, inverse_cdf


def accept(exam: Exam) -> None:
    """Judge what was proposed, each row by its own rule."""
    proposal, scores, plan, verdict = exam.proposal, exam.scores, exam.plan, exam.verdict
    if plan.probabilities:
        exam = exam._replace(p=scores.softmax(-1))
    verdict.target_probabilities = exam.p
    if plan.coupled:
        accept_picked(exam)
    if plan.draws:
        accept_drawn(exam)
    proposal.nodes.count_proposed(proposal.tokens, proposal.proposed, verdict)


def accept_picked(exam: Exam) -> None:
    """Accept the longest path of what the target picks itself, whatever its shape; its pick follows."""
    proposal, scores, rows, plan, noise, verdict, _ = exam
    nodes, tokens = proposal.nodes, proposal.tokens
    verdict.winners.pick(scores, None if noise.gumbel is None else nodes.at_depths(noise.gumbel))
    if not plan.draft_length:
        return
    passed = nodes.agree(tokens, verdict)
    if plan.lenient:
        passed.logical_or_(likely_enough(nodes.at_parents(scores), tokens, rows))
    nodes.accept_deepest(passed, proposal.proposed if plan.ragged else None, verdict)
    if plan.lenient:  # what is accepted need not be what the target would have picked
        accepted = counting(plan.draft_length, scores.device) < verdict.accepted[:, None]
        verdict.leading.copy_(torch.where(accepted, nodes.said(tokens, verdict), verdict.leading))


def accept_drawn(exam: Exam) -> None:
    """Judge the first line as if it were alone, then what is beside it, if anything is; draw the token that follows."""
    proposal, _, rows, plan, _, verdict, p = exam
    assert p is not None
    nodes, k, share = proposal.nodes, plan.draft_length, None
    line, p_of_line = proposal.first_line(k), p[:, : k + 1]
    if k:
        share = examine(line, p_of_line, exam)
        nodes.accept_first_line(rows.coupled if plan.coupled else None, verdict)
    weights = residual(line, p_of_line, verdict.accepted, share)
    if isinstance(nodes, Tree):
        going = rows.more & ~rows.coupled
        left = descend(weights / weights.sum(-1, keepdim=True), going, nodes, exam)
        weights = torch.where(going[:, None], left, weights)
    put_next(weights, nodes.said(proposal.tokens, verdict), exam)


def examine(line: Proposal, p: Tensor, exam: Exam) -> Tensor | None:
    """Accept of a line, by its p [A, K+1, V], in rows that draw; return the weight of its q in the residual [A].

    None means 1.
    """
    _, _, rows, plan, noise, verdict, _ = exam
    assert noise.test is not None
    q, tokens, proposed = line.probabilities, line.tokens, line.proposed if plan.ragged else None
    chances = Chances(p, q, chosen(p, tokens), chosen(q, tokens), noise.test[:, : plan.draft_length])
    if plan.tokenwise:
        needed = chances.u * chances.q_chosen
        if plan.lenient:
            needed = needed * rows.lenience[:, None]
        torch.lt(needed, chances.p_chosen, out=verdict.passed)
        put_accepted(partial(verdict.accept_passed, proposed), ~rows.coupled if plan.coupled else None, verdict)
    if not plan.rejection:
        return rows.lenience if plan.lenient else None
    others = plan.coupled or plan.tokenwise
    judge = partial(judge_jointly, verdict.joint, chances, proposed)
    put_accepted(judge, rows.rejection if others else None, verdict)
    share = share_of_q(verdict.joint, verdict.next_index)
    return torch.where(rows.rejection, share, rows.lenience) if others else share


def put_accepted(judge: Callable[[Tensor], None], some: Tensor | None, verdict: Verdict) -> None:
    """Let a rule write how many proposals it accepts [A], in `some` rows [A] or in all."""
    if some is None:
        judge(verdict.accepted)
        return
    judge(found := torch.empty(len(some), dtype=torch.int64, device=some.device))
    verdict.accepted.copy_(torch.where(some, found, verdict.accepted))


def residual(proposal: Proposal, target: Tensor, accepted: Tensor, share: Tensor | None = None) -> Tensor:
    """Return weights [A, V] for the next token: p where all proposals are accepted, max(0, p − share · q) elsewhere."""
    tokens = proposal.tokens
    p = pick(target, accepted)
    if tokens.shape[1] == 0:
        return p
    position = accepted.clamp(max=tokens.shape[1] - 1)
    if proposal.probabilities is None:
        q = torch.zeros_like(p).scatter_(1, tokens.gather(1, position[:, None]), 1.0)
    else:
        q = pick(proposal.probabilities, position)
    counts = accepted < proposal.proposed
    counts = counts.to(p.dtype) if share is None else (counts * share).to(p.dtype)
    difference = torch.addcmul(p, q, counts[:, None], value=-1).clamp_(min=0)
    # If p equals q up to rounding, nothing is left and p decides. Otherwise this share is too small to be drawn.
    return difference.add_(p, alpha=NEGLIGIBLE)


def put_next(distribution: Tensor, tokens: Tensor, exam: Exam) -> None:
    """Draw the next token of rows that draw it, and write it after those of `tokens` [A, K] that are accepted."""
    verdict, draw = exam.verdict, exam.noise.draw
    assert draw is not None
    drawn = inverse_cdf(distribution, draw[:, -1:])
    if exam.plan.coupled:
        tokens = torch.cat([tokens, drawn], 1).scatter_(1, verdict.next_index, drawn)
        verdict.tokens.copy_(torch.where(exam.rows.coupled[:, None], verdict.tokens, tokens))
    else:
        verdict.leading.copy_(tokens)
        verdict.tokens.scatter_(1, verdict.next_index, drawn)


def likely_enough(scores: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
    """Mark the tokens [A, N] that lenience accepts in a greedy row, by the scores [A, N, V] they are judged by."""
    below_best = chosen(scores, tokens) - scores.amax(-1)
    return (below_best >= rows.lenience.log()[:, None]) & (rows.lenience < 1)[:, None]


def flag_no_numbers(logits: Tensor, verdict: Verdict) -> None:
    """Set `proposed` to -1, which the host refuses, where the next token's logit is not finite.

    The token is moved into the vocabulary: one outside it would end all work on a GPU before the host reads it.
    """
    last = logits.shape[2] - 1
    token = verdict.tokens.gather(1, verdict.next_index)
    drawn_from = pick(logits, verdict.last).gather(1, token.clamp(max=last))
    no_number = drawn_from - drawn_from != 0  # two kernels; torch makes five to ask what is finite
    verdict.proposed.masked_fill_(((token > last) | no_number)[:, 0], -1)
    verdict.tokens.clamp_(max=last)
