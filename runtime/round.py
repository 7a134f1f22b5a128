"""One round of speculation: draft, verify, accept, commit. The same code for CPU and GPU, batch and single."""

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from .acceptance import Noise, Proposal, Verdict, accept
from .drafters import propose
from .model import Model
from .noise import gumbels
from .rows import Plan, Rows, counting
from .transform import transform


@dataclass(frozen=True)
class Round:
    """What a round decided, still on the device, and how long its parts took on the host's clock."""

    tokens: Tensor  # [A, K+1]: the accepted proposals, the next token, then garbage
    proposal: Proposal
    verdict: Verdict
    logits: Tensor  # [A, K+1, V] of the target, untransformed
    draft_ms: float
    verify_ms: float
    accept_ms: float


def run_round(rows: Rows, plan: Plan, draft: Model | None, target: Model, span: int) -> Round:
    """Advance every row of `rows` by one to K+1 tokens; no committed length reaches `span` before the round."""
    began = perf_counter()
    window = rows.window()
    noise = draw_noise(rows, plan, target.vocab_size)
    drawn = perf_counter()
    proposal = propose(rows, plan, draft, noise, window, span)
    drafted = perf_counter()
    logits = target.score(window[:, 1], proposal.tokens, rows.length)
    verified = perf_counter()
    scores = transform(logits, rows, plan, counts_at_each_position(rows, plan, proposal))
    verdict = accept(proposal, scores, rows, plan, noise)
    tokens = commit(rows, plan, proposal, verdict)
    accept_ms = 1e3 * (drawn - began + perf_counter() - verified)
    return Round(tokens, proposal, verdict, logits, 1e3 * (drafted - drawn), 1e3 * (verified - drafted), accept_ms)


def draw_noise(rows: Rows, plan: Plan, vocab_size: int) -> Noise:
    gumbel = draw = test = None
    if plan.gumbel:
        index = rows.length[:, None] + counting(plan.draft_length + 1, rows.length.device)
        gumbel = gumbels(rows.seed, index, vocab_size) * rows.noise_scale[:, None, None]
    if plan.rejection:
        draw, test = rows.round_uniforms()
    return Noise(gumbel, draw, test)


def counts_at_each_position(rows: Rows, plan: Plan, proposal: Proposal) -> Tensor | None:
    """Output counts [A, K+1, V] as plain decoding would have them at each verify row: proposals before it included."""
    if not plan.penalised:
        return None
    ahead = torch.zeros(plan.batch, plan.draft_length + 1, rows.output_counts.shape[1], device=rows.length.device)
    ahead[:, 1:].scatter_(2, proposal.tokens[:, :, None], 1.0)
    return rows.output_counts[:, None] + ahead.cumsum(1)


def commit(rows: Rows, plan: Plan, proposal: Proposal, verdict: Verdict) -> Tensor:
    """Write the round's tokens and move each length: this is commit and rollback in one."""
    tokens = torch.cat([proposal.tokens, verdict.next_token[:, None]], 1)  # [A, K+1]
    tokens.scatter_(1, verdict.accepted[:, None], verdict.next_token[:, None])
    offset = counting(plan.draft_length + 1, tokens.device)
    rows.tokens.scatter_(1, rows.length[:, None] + offset, tokens)
    rows.length += verdict.accepted + 1
    if plan.penalised:
        committed = (offset <= verdict.accepted[:, None]).float()
        rows.output_counts.scatter_add_(1, tokens, committed)
    return tokens
