"""Three exact tests say which prefix of the proposal stands and which token follows it. Pure torch, no sync.

rejection: judge all proposals together, as `block_verification.py` says; never keeps fewer than tokenwise.
tokenwise: accept d iff u·q(d) < p(d), else draw from norm(max(0, p − q)).
coupled:   target and draft pick argmax(score + the same noise); accept while they agree. Greedy has zero noise.

Lenience l < 1 is tokenwise and replaces q by l·q, so that more is accepted, and lets greedy rows keep a token at least
l times as likely as the best one. The loss is bounded: acceptance gives a token min(q, p/l), and the residual adds
R·max(0, p − l·q) / (1 − l + l·R) where R = 1 − Σ min(q, p/l), and since l·R ≤ 1 − l + l·R their sum is at most p/l.
If a sibling or another line is tested in the same way by what is left, the second part may become 1/l times as much; it
still is at most p/l − q, since R ≤ 1 − l + l·R.
"""

import torch
from torch import Tensor

from ..state.indexing import counting, pick
from ..state.proposal import Proposal
from ..state.rows import Rows
from ..state.verdict import Verdict
from .block_verification import Chances, judge_jointly, share_of_q
from .exam import Exam
from .sums import rising_sums

NEGLIGIBLE = 2.0**-100  # a share below the resolution of the uniforms


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Draw tokens [A, 1] by uniforms u [A, 1] from unnormalised weights [A, V], never a token of weight zero."""
    cumulative = rising_sums(weights, torch.float64)
    return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)


def judge(exam: Exam) -> Tensor | None:
    """Judge a line; return what rows that draw their next token have drawn it from [A, V]."""
    proposal, scores, _, plan, noise, verdict, p = exam
    verdict.proposed.copy_(proposal.proposed)
    if plan.coupled:
        verdict.winners.pick(scores, noise.gumbel)
    share = None
    if plan.draft_length:
        share = examine(exam)
        if plan.lenient and plan.coupled:  # what stands need not be what the target would have picked
            stands = counting(plan.draft_length, scores.device) < verdict.accepted[:, None]
            verdict.leading.copy_(torch.where(stands, proposal.tokens, verdict.leading))
    if not plan.draws:
        return None
    assert p is not None
    assert noise.draw is not None
    distribution = residual(proposal, p, verdict.accepted, share)
    put_next(distribution, proposal.tokens, exam)
    return distribution


def put_next(distribution: Tensor, tokens: Tensor, exam: Exam) -> None:
    """Draw the next token of rows that draw it, and write it behind those of `tokens` [A, K] that stand."""
    verdict, draw = exam.verdict, exam.noise.draw
    assert draw is not None
    drawn = inverse_cdf(distribution, draw[:, -1:])
    if exam.plan.coupled:
        tokens = torch.cat([tokens, drawn], 1).scatter_(1, verdict.next_index, drawn)
        verdict.tokens.copy_(torch.where(exam.rows.coupled[:, None], verdict.tokens, tokens))
    else:
        verdict.leading.copy_(tokens)
        verdict.tokens.scatter_(1, verdict.next_index, drawn)


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


def examine(exam: Exam) -> Tensor | None:
    """Decide how many proposals stand in each row; return the weight of its q in the residual [A], None for 1."""
    proposal, scores, rows, plan, noise, verdict, p = exam
    proposed = proposal.proposed if plan.ragged else None
    chances = None
    if plan.draws:
        assert p is not None
        assert noise.test is not None
        chances = Chances(
            p,
            proposal.probabilities,
            chosen(p, proposal.tokens),
            chosen(proposal.probabilities, proposal.tokens),
            noise.test[:, : plan.draft_length],
        )
    if plan.coupled or plan.tokenwise:
        examine_one_by_one(exam, chances)
        if proposed is not None:
            verdict.passed.logical_and_(counting(plan.draft_length, scores.device) < proposed[:, None])
        torch.argmin(verdict.standing, 1, out=verdict.accepted)  # the first that does not stand
    if not plan.rejection:
        return rows.lenience if plan.lenient else None
    assert chances is not None
    if not plan.coupled and not plan.tokenwise:
        judge_jointly(verdict.joint, chances, proposed, verdict.accepted)
        return share_of_q(verdict.joint, verdict.next_index)
    standing = torch.empty_like(proposal.proposed)
    judge_jointly(verdict.joint, chances, proposed, standing)
    verdict.accepted.copy_(torch.where(rows.rejection, standing, verdict.accepted))
    return torch.where(rows.rejection, share_of_q(verdict.joint, verdict.next_index), rows.lenience)


def examine_one_by_one(exam: Exam, chances: Chances | None) -> None:
    """Mark which proposals [A, K] pass the test of a rule that judges each by itself."""
    proposal, scores, rows, plan, _, verdict, _ = exam
    passed = verdict.passed
    if plan.coupled:
        torch.eq(verdict.leading, proposal.tokens, out=passed)
        if plan.lenient:
            passed.logical_or_(likely_enough(scores[:, :-1], proposal.tokens, rows))
    if plan.tokenwise:
        assert chances is not None
        needed = chances.u * chances.q_chosen
        if plan.lenient:
            needed = needed * rows.lenience[:, None]
        fair = needed < chances.p_chosen
        passed.copy_(torch.where(rows.coupled[:, None], passed, fair) if plan.coupled else fair)


def likely_enough(scores: Tensor, tokens: Tensor, rows: Rows) -> Tensor:
    """Mark the tokens [A, N] that lenience lets stand in a greedy row, by the scores [A, N, V] they are judged by."""
    behind_the_best = chosen(scores, tokens) - scores.amax(-1)
    return (behind_the_best >= rows.lenience.log()[:, None]) & (rows.lenience < 1)[:, None]


def chosen(probabilities: Tensor | None, tokens: Tensor) -> Tensor:
    """Return the probability [A, K] of each token at its position, which is 1 if the proposals were certain."""
    if probabilities is None:
        return torch.ones_like(tokens, dtype=torch.float32)
    return probabilities.gather(2, tokens[:, :, None]).squeeze(2)


def residual(proposal: Proposal, target: Tensor, accepted: Tensor, share: Tensor | None = None) -> Tensor:
    """Return weights [A, V] for the next token: p where all proposals stand, max(0, p − share · q) elsewhere."""
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
