"""Where proposals come from: the draft model, or a copy of what followed the same words earlier in the context."""

import torch
from torch import Tensor

from .acceptance import Noise, Proposal, inverse_cdf
from .frame import Frame
from .rows import Plan, Rows
from .transform import draft_transform

DRAFTERS = ("model", "lookup", "none")
LONGEST_MATCH = 4  # tokens of the suffix that lookup compares


def propose(rows: Rows, plan: Plan, frame: Frame, noise: Noise, span: int) -> Proposal:
    """Fill the frame with K tokens for every row from the source the row has chosen.

    `span` bounds the committed lengths.
    """
    count, probabilities = rows.from_model, None
    if plan.model:
        probabilities = draft(rows, plan, frame, noise)
    if plan.draft_length:
        frame.line_up()
    if plan.lookup:
        copied, found = look_up(rows, plan, span)
        count = count + rows.from_lookup * found
        if plan.model:
            copies = rows.from_lookup[:, None] > 0
            copied = torch.where(copies, copied, frame.proposed)
            if probabilities is not None:
                certain = torch.zeros_like(probabilities).scatter_(2, copied[:, :, None], 1.0)
                probabilities = torch.where(copies[:, :, None], certain, probabilities)
        frame.proposed.copy_(copied)
    return Proposal(frame.proposed, count, probabilities)


def draft(rows: Rows, plan: Plan, frame: Frame, noise: Noise) -> Tensor | None:
    """Sample K tokens from the draft, each by the request's transform and rule; their q [A, K, V] if needed."""
    probabilities: list[Tensor] = []
    counts = rows.output_counts[:, None].clone() if plan.penalised else None  # [A, 1, V]
    draws = None if noise.draw is None else noise.draw[:, :, None].unbind(1)
    for i, (step, winners) in enumerate(zip(frame.drafts, frame.drafted, strict=True)):
        step.run()
        token = winners.tokens  # [A, 1]
        scores = draft_transform(frame.draft_logits, rows, plan, counts)  # [A, 1, V]
        if plan.probabilities:
            probabilities.append(scores.softmax(-1))
        if plan.coupled:
            winners.pick(scores, None if noise.gumbel is None else noise.gumbel[:, i : i + 1])
        if plan.rejection:
            assert draws is not None
            drawn = inverse_cdf(probabilities[-1][:, 0], draws[i])
            token.copy_(torch.where(rows.coupled[:, None], token, drawn) if plan.coupled else drawn)
        if counts is not None:
            counts.scatter_add_(2, token[:, None], torch.ones_like(counts[..., :1]))
    return torch.cat(probabilities, 1) if probabilities else None


def look_up(rows: Rows, plan: Plan, span: int) -> tuple[Tensor, Tensor]:
    """Tokens [A, K] that followed the latest of the longest earlier matches of the context's end, and where one is.

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
    return context.gather(1, (best + 1 + ahead).clamp(max=span - 1)), found
