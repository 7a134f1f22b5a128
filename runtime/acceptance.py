"""The two exact tests: which prefix of the proposal stands, and which token follows it. Pure torch, no sync.

rejection: accept d iff u·q(d) < p(d), else draw from norm(max(0, p − q)).
coupled:   target and draft pick argmax(score + the same noise); accept while they agree. Greedy has zero noise.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .rows import Plan, Rows, counting


@dataclass(frozen=True)
class Noise:
    """All randomness of one round; None where no row needs it."""

    gumbel: Tensor | None  # [A, K+1, V], zero in greedy rows
    draw: Tensor | None  # [A, 17] uniforms that draw tokens: proposal i by column i, the next token by the last
    test: Tensor | None  # [A, 17] uniforms that test proposals


@dataclass(frozen=True)
class Proposal:
    """What the drafters propose, and the distribution each proposal was truly sampled from."""

    tokens: Tensor  # [A, K]
    count: Tensor  # [A] how many of them the row proposes
    probabilities: Tensor | None  # [A, K, V]; None: every proposal was certain


@dataclass(frozen=True)
class Verdict:
    """`accepted` proposals stand in each row and `next_token` follows them."""

    accepted: Tensor  # [A]
    next_token: Tensor  # [A]
    target_probabilities: Tensor | None  # [A, K+1, V]


def winners(scores: Tensor, gumbel: Tensor | None) -> Tensor:
    """The token each position picks under the coupled rule; ties go to the lowest id."""
    scores = scores if gumbel is None else scores + gumbel
    if scores.device.type == "cpu":  # numpy's vectorised search takes a tenth of torch's time
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def inverse_cdf(weights: Tensor, u: Tensor) -> Tensor:
    """The token [A] that the uniform u [A] draws from unnormalised weights [A, V]; one without weight never."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    return torch.searchsorted(cumulative, (u * cumulative[:, -1])[:, None], right=True)[:, 0]


def accept(proposal: Proposal, scores: Tensor, rows: Rows, plan: Plan, noise: Noise) -> Verdict:
    """Judge proposals by the target's transformed `scores` [A, K+1, V]."""
    tokens, k = proposal.tokens, plan.draft_length
    p = scores.softmax(-1) if plan.probabilities else None
    picked = winners(scores, noise.gumbel) if plan.coupled else None  # [A, K+1]
    accepted = proposal.count  # [A]
    if k:
        stands = counting(k, tokens.device) < proposal.count[:, None]  # [A, K]
        stands &= passes(proposal, picked, p, rows, noise)
        accepted = stands.cumprod(1).sum(1)
    if picked is not None:
        next_token = picked.gather(1, accepted[:, None])[:, 0]
    if plan.rejection:
        assert p is not None
        assert noise.draw is not None
        drawn = inverse_cdf(residual(proposal, p, accepted), noise.draw[:, -1])
        next_token = torch.where(rows.coupled, next_token, drawn) if plan.coupled else drawn
    return Verdict(accepted, next_token, p)


def passes(proposal: Proposal, picked: Tensor | None, p: Tensor | None, rows: Rows, noise: Noise) -> Tensor:
    """Which proposals [A, K] pass the test of their row's rule."""
    tokens, k = proposal.tokens, proposal.tokens.shape[1]
    if noise.test is None:
        assert picked is not None
        return picked[:, :k] == tokens
    assert p is not None
    passed = noise.test[:, :k] * chosen(proposal.probabilities, tokens) < chosen(p[:, :k], tokens)
    return passed if picked is None else torch.where(rows.coupled[:, None], picked[:, :k] == tokens, passed)


def chosen(probabilities: Tensor | None, tokens: Tensor) -> Tensor:
    """The probability [A, K] of each token; certain ones have one."""
    if probabilities is None:
        return torch.ones_like(tokens, dtype=torch.float32)
    return probabilities.gather(2, tokens[:, :, None])[:, :, 0]


def at_position(tensor: Tensor, position: Tensor) -> Tensor:
    """Row a of the result [A, V] is tensor[a, position[a]]."""
    first = torch.arange(len(tensor), device=tensor.device) * tensor.shape[1]
    return tensor.flatten(0, 1).index_select(0, first + position)


def residual(proposal: Proposal, target: Tensor, accepted: Tensor) -> Tensor:
    """What the next token is drawn from [A, V]: p where all proposals stand, else max(0, p − q) at the rejected one."""
    tokens = proposal.tokens
    p = at_position(target, accepted)
    if tokens.shape[1] == 0:
        return p
    position = accepted.clamp(max=tokens.shape[1] - 1)
    if proposal.probabilities is None:
        q = torch.zeros_like(p).scatter_(1, tokens.gather(1, position[:, None]), 1.0)
    else:
        q = at_position(proposal.probabilities, position)
    difference = (p - q * (accepted < proposal.count)[:, None]).clamp_(min=0)
    # p equal to q up to rounding leaves nothing, and then either is the answer.
    empty = difference.sum(1, keepdim=True) == 0
    return torch.where(empty, p, difference)
