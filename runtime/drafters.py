"""Where proposals come from: the draft model, or a copy of what followed the same words earlier in the context."""

import torch
from torch import Tensor

from .acceptance import Noise, Proposal, inverse_cdf, winners
from .model import Model
from .rows import Plan, Rows
from .transform import transform

DRAFTERS = ("model", "lookup", "none")
LONGEST_MATCH = 4  # tokens of the suffix that lookup compares


def propose(rows: Rows, plan: Plan, draft: Model | None, noise: Noise, window: Tensor, span: int) -> Proposal:
    """K tokens for every row from the source the row has chosen.

    `window` [A, 2] holds the last committed tokens; `span` bounds the committed lengths.
    """
    if not plan.draft_length:
        return Proposal(rows.tokens[:, :0], torch.zeros_like(rows.length), None)
    if not plan.lookup:
        assert draft is not None
        return propose_by_model(rows, plan, draft, noise, window)
    copied = propose_by_lookup(rows, plan, span)
    if not plan.model:
        return copied
    assert draft is not None
    sampled = propose_by_model(rows, plan, draft, noise, window)
    tokens = torch.where(rows.use_lookup[:, None], copied.tokens, sampled.tokens)
    count = torch.where(rows.use_lookup, copied.count, sampled.count)
    probabilities = sampled.probabilities
    if probabilities is not None:
        certain = torch.zeros_like(probabilities).scatter_(2, copied.tokens[:, :, None], 1.0)
        probabilities = torch.where(rows.use_lookup[:, None, None], certain, probabilities)
    return Proposal(tokens, count, probabilities)


def propose_by_model(rows: Rows, plan: Plan, draft: Model, noise: Noise, window: Tensor) -> Proposal:
    """Sample K tokens from the draft, each by the request's own transform and rule."""
    tokens: list[Tensor] = []
    probabilities: list[Tensor] = []
    counts = rows.output_counts[:, None].clone() if plan.penalised else None  # [A, 1, V]
    step = draft.begin(window, rows.length)
    for i in range(plan.draft_length):
        if i:
            step = draft.extend(tokens[-1], rows.length, i - 1)
        scores = transform(draft.logits(step), rows, plan, counts)  # [A, 1, V]
        if plan.probabilities:
            probabilities.append(scores.softmax(-1))
        if plan.coupled:
            token = picked = winners(scores, None if noise.gumbel is None else noise.gumbel[:, i : i + 1])[:, 0]
        if plan.rejection:
            assert noise.draw is not None
            token = drawn = inverse_cdf(probabilities[-1][:, 0], noise.draw[:, i])
        if plan.coupled and plan.rejection:
            token = torch.where(rows.coupled, picked, drawn)
        if counts is not None:
            counts.scatter_add_(2, token[:, None, None], torch.ones_like(counts[..., :1]))
        tokens.append(token)
    return Proposal(
        torch.stack(tokens, 1),
        rows.draft_length * rows.use_model,
        torch.cat(probabilities, 1) if probabilities else None,
    )


def propose_by_lookup(rows: Rows, plan: Plan, span: int) -> Proposal:
    """Copy what followed the latest of the longest earlier matches of the context's last tokens.

    A match that ends less than K tokens ago goes on into its own copy, as repetition does.
    """
    context = rows.tokens[:, :span]  # [A, L]
    position = torch.arange(span, device=context.device)
    last = rows.length[:, None] - 1
    matched = (position < last).long()  # how many tokens ending at each position equal the suffix, plus one
    alive = matched.bool()
    for back in range(min(LONGEST_MATCH, span)):
        suffix = context.gather(1, (last - back).clamp(min=0))  # [A, 1]
        shifted = context if back == 0 else torch.nn.functional.pad(context[:, :-back], (back, 0), value=-1)
        alive = alive & (shifted == suffix) & (back <= last)
        matched = matched + alive
    best = (matched * span + position).argmax(1, keepdim=True)  # [A, 1]
    found = matched.gather(1, best)[:, 0] > 1
    period = last - best
    ahead = torch.arange(plan.draft_length, device=context.device) % period.clamp(min=1)
    tokens = context.gather(1, (best + 1 + ahead).clamp(max=span - 1))
    return Proposal(tokens, rows.draft_length * (rows.use_lookup & found), None)
