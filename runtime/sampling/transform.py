"""From logits to the scores a request samples from: bias, penalties, temperature, top-k, top-p, min-p.

Applied to target and draft alike *before* any acceptance rule, so that p and q are what is truly sampled from.
"""

import functools
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..round.rows import Plan, Rows
from .acceptance import Proposal


def transform(logits: Tensor, rows: Rows, plan: Plan, counts: Tensor | None) -> Tensor:
    """Scores [A, W, V] whose softmax is the request's distribution; excluded tokens are -inf.

    `counts` [A, W, V] says how often each token is in the output before each position.
    """
    scores = logits
    if plan.biased:
        scores = scores + rows.bias[:, None]
    if counts is not None:
        scores = penalise(scores, rows, counts)
    if plan.tempered:
        scores = scores / rows.temperature[:, None, None]
    if plan.top_k or plan.top_p or plan.min_p:
        scores = keep_likeliest(scores, rows, plan)
    return scores


def draft_transform(logits: Tensor, rows: Rows, plan: Plan, counts: Tensor | None) -> Tensor:
    """As `transform`, at the draft's own temperature: what it samples from is the softmax of exactly these scores."""
    if not plan.own_draft:
        return transform(logits, rows, plan, counts)
    own = replace(rows, temperature=rows.draft_temperature)
    scores = transform(logits, own, replace(plan, tempered=True), counts)
    return cut_below(scores, scores.amax(-1, keepdim=True) - rows.draft_depth[:, None, None])


def penalise(scores: Tensor, rows: Rows, counts: Tensor) -> Tensor:
    repetition, presence, frequency = (
        penalty[:, None, None] for penalty in (rows.repetition, rows.presence, rows.frequency)
    )
    seen = (counts + rows.prompt_counts[:, None]) > 0
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    scores = torch.where(seen, repeated, scores)
    return scores - counts * frequency - (counts > 0) * presence


def keep_likeliest(scores: Tensor, rows: Rows, plan: Plan) -> Tensor:
    """Top-k, then top-p, then min-p. Tokens tied with the last one kept stay."""
    kept = ordered = ascending(scores)  # [A, W, V]
    thresholds = []  # [A, W, 1] each; the highest decides
    if plan.top_k:
        kth = (ordered.shape[2] - rows.top_k)[:, None, None].expand(-1, ordered.shape[1], 1)
        thresholds.append(ordered.gather(2, kth))
        kept = cut_below(ordered, thresholds[0])
    if plan.top_p:
        unlikely = rows.unlikely[:, : ordered.shape[1]].contiguous()
        dropped = torch.searchsorted(kept.softmax(-1).cumsum(-1), unlikely, right=True)
        thresholds.append(ordered.gather(2, dropped.clamp_(max=ordered.shape[2] - 1)))
    if plan.min_p:
        thresholds.append(ordered[..., -1:] + rows.log_min_p[:, None, None])
    return cut_below(scores, functools.reduce(torch.maximum, thresholds))


def cut_below(scores: Tensor, threshold: Tensor) -> Tensor:
    """Scores below the threshold become -inf."""
    return torch.where(scores >= threshold, scores, -torch.inf)


def ascending(scores: Tensor) -> Tensor:
    if scores.device.type == "cpu":  # numpy's vectorised sort takes a tenth of torch's time
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1))
    return scores.sort(dim=-1).values


def counts_at_each_position(rows: Rows, plan: Plan, proposal: Proposal) -> Tensor | None:
    """Output counts [A, K+1, V] as plain decoding would have them at each verify row: proposals before it included."""
    if not plan.penalised:
        return None
    ahead = torch.zeros(plan.batch, plan.draft_length + 1, rows.output_counts.shape[1], device=rows.length.device)
    ahead[:, 1:].scatter_(2, proposal.tokens[:, :, None], 1.0)
    return rows.output_counts[:, None] + ahead.cumsum(1)
