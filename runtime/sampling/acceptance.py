"""Two exact tests say which prefix of the proposal stands and which token follows it. Pure torch, no sync.

rejection: accept d iff u·q(d) < p(d), else draw from norm(max(0, p − q)).
coupled:   target and draft pick argmax(score + the same noise); accept while they agree. Greedy has zero noise.

Lenience l < 1 replaces q by l·q, so that more is accepted, and lets greedy rows keep a token at least l times as
likely as the best one. The loss is bounded: acceptance gives a token min(q, p/l), and the residual adds
R·max(0, p − l·q) / (1 − l + l·R) where R = 1 − Σ min(q, p/l), and since l·R ≤ 1 − l + l·R their sum is at most p/l.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..round.plan import Plan
from ..round.rows import Rows, counting, pick

NEGLIGIBLE = 2.0**-100  # a share below the resolution of the uniforms


class Noise(NamedTuple):
    """All randomness of one round; None where no row needs it."""

    gumbel: Tensor | None  # [A, K+1, V], zero in greedy rows
    draw: Tensor | None  # [A, 17] uniforms that draw tokens: column i draws proposal i, the last the next token
    test: Tensor | None  # [A, 17] uniforms that test proposals


class Proposal(NamedTuple):
    """What the drafters propose, and the distribution each proposal was truly sampled from."""

    tokens: Tensor  # [A, K]
    proposed: Tensor  # [A] how many of the tokens each row proposes
    probabilities: Tensor | None  # [A, K, V]; None: every proposal was certain
    entropies: Tensor | None = None  # [A, K] the draft's entropy at each, if asked for


class Winners:
    """Fixed memory [A, W] for the tokens picked under the coupled rule; ties go to the lowest id.

    `logits` [A, W, V] are the scores if nothing transforms them.
    """

    def __init__(self, logits: Tensor, tokens: Tensor) -> None:
        self.logits, self.tokens = logits, tokens
        self._on_cpu = logits.device.type == "cpu"
        if self._on_cpu:  # numpy's vectorised search takes a tenth of torch's time
            self._logits, self._tokens = logits.numpy(), tokens.numpy()

    def pick(self, scores: Tensor, gumbel: Tensor | None) -> None:
        if gumbel is not None:
            scores = scores + gumbel
        if self._on_cpu:
            (self._logits if scores is self.logits else scores.numpy()).argmax(-1, self._tokens)
        else:
            torch.argmax(scores, -1, out=self.tokens)


class Verdict:
    """The outcome of a round: `accepted` proposals stand in each row and the next token follows them."""

    def __init__(self, logits: Tensor) -> None:
        batch, width, _ = logits.shape
        self.table = torch.zeros(batch, width + 2, dtype=torch.int64, device=logits.device)  # what the host copies
        self.accepted = self.table[:, 0]
        self.proposed = self.table[:, 1]
        self.tokens = self.table[:, 2:]  # [A, K+1]: the accepted proposals, the next token, then garbage
        self.next_index = self.table[:, :1]  # [A, 1]: where in `tokens` the next token is
        self.winners = Winners(logits, self.tokens)
        self.leading = self.tokens[:, :-1]  # [A, K]
        stands = torch.zeros(batch, width, dtype=torch.bool, device=logits.device)  # the last column stays False
        self.passed = stands[:, :-1]  # [A, K]
        self.standing = stands.view(torch.uint8)
        self.target_probabilities: Tensor | None = None  # [A, K+1, V]


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """Draw tokens [A, 1] by uniforms u [A, 1] from unnormalised weights [A, V], never a token of weight zero."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)


def accept(proposal: Proposal, scores: Tensor, rows: Rows, plan: Plan, noise: Noise, verdict: Verdict) -> None:
    """Judge proposals by the target's transformed `scores` [A, K+1, V]."""
    p = verdict.target_probabilities = scores.softmax(-1) if plan.probabilities else None
    verdict.proposed.copy_(proposal.proposed)
    if plan.coupled:
        verdict.winners.pick(scores, noise.gumbel)
    if plan.draft_length:
        examine(proposal, scores, p, rows, plan, noise, verdict)
        torch.argmin(verdict.standing, 1, out=verdict.accepted)  # the first that does not stand
        if plan.lenient and plan.coupled:  # what stands need not be what the target would have picked
            stands = counting(plan.draft_length, scores.device) < verdict.accepted[:, None]
            verdict.leading.copy_(torch.where(stands, proposal.tokens, verdict.leading))
    if plan.rejection:
        assert p is not None
        assert noise.draw is not None
        lenience = rows.lenience if plan.lenient else None
        drawn = inverse_cdf(residual(proposal, p, verdict.accepted, lenience), noise.draw[:, -1:])
        tokens = torch.cat([proposal.tokens, drawn], 1).scatter_(1, verdict.next_index, drawn)
        verdict.tokens.copy_(torch.where(rows.coupled[:, None], verdict.tokens, tokens) if plan.coupled else tokens)


def flag_no_numbers(logits: Tensor, verdict: Verdict) -> None:
    """Set `proposed` to -1, which the host refuses, where the next token's logit is not finite.

    The token is moved into the vocabulary: one outside it would end all work on a GPU before the host reads it.
    """
    last = logits.shape[2] - 1
    token = verdict.tokens.gather(1, verdict.next_index)
    drawn_from = pick(logits, verdict.accepted).gather(1, token.clamp(max=last))
    verdict.proposed.masked_fill_(((token > last) | ~drawn_from.isfinite())[:, 0], -1)
    verdict.tokens.clamp_(max=last)


def examine(
    proposal: Proposal, scores: Tensor, p: Tensor | None, rows: Rows, plan: Plan, noise: Noise, verdict: Verdict
) -> None:
    """Mark which proposals [A, K] pass the test of their row's rule."""
    agree = torch.eq(verdict.leading, proposal.tokens, out=None if plan.rejection else verdict.passed)
    if plan.lenient and plan.coupled:
        likely = chosen(scores[:, :-1], proposal.tokens) - scores[:, :-1].amax(-1) >= rows.lenience.log()[:, None]
        agree.logical_or_(likely & (rows.lenience < 1)[:, None])
    if plan.rejection:
        assert p is not None
        assert noise.test is not None
        passed = noise.test[:, : plan.draft_length] * chosen(proposal.probabilities, proposal.tokens)
        if plan.lenient:
            passed = passed * rows.lenience[:, None]
        passed = passed < chosen(p[:, :-1], proposal.tokens)
        verdict.passed.copy_(torch.where(rows.coupled[:, None], agree, passed) if plan.coupled else passed)
    if plan.ragged:
        verdict.passed.logical_and_(counting(plan.draft_length, agree.device) < proposal.proposed[:, None])


def chosen(probabilities: Tensor | None, tokens: Tensor) -> Tensor:
    """Return the probability [A, K] of each token, which is 1 if the proposals were certain."""
    if probabilities is None:
        return torch.ones_like(tokens, dtype=torch.float32)
    return probabilities.gather(2, tokens[:, :, None])[:, :, 0]


def residual(proposal: Proposal, target: Tensor, accepted: Tensor, lenience: Tensor | None = None) -> Tensor:
    """Return weights [A, V] for the next token: p where all proposals stand, else max(0, p − q) at the rejected one."""
    tokens = proposal.tokens
    p = pick(target, accepted)
    if tokens.shape[1] == 0:
        return p
    position = accepted.clamp(max=tokens.shape[1] - 1)
    if proposal.probabilities is None:
        q = torch.zeros_like(p).scatter_(1, tokens.gather(1, position[:, None]), 1.0)
    else:
        q = pick(proposal.probabilities, position)
    if lenience is not None:
        q = q * lenience[:, None]
    difference = (p - q * (accepted < proposal.proposed)[:, None]).clamp_(min=0)
    # If p equals q up to rounding, nothing is left and p decides; beside any other weight this share is never drawn.
    return difference.add_(p, alpha=NEGLIGIBLE)
