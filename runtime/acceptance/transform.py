"""Turns logits into the scores a request samples from: grammar, bias, penalties, temperature, top-k, top-p, min-p.

It applies to target and draft alike *before* any acceptance rule, so that p and q are what is truly sampled from.
"""

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..state.place import on_host
from ..state.plan import Plan, ReadingFilter
from ..state.proposal import ProposedTokens
from ..state.rows import Columns, Rows
from .filters import Change, Cut, cut_below
from .filters.temperature import at_the_drafts_own, cut_to_depth


def transform(logits: Tensor, rows: Rows, plan: Plan, proposed: ProposedTokens | None) -> Tensor:
    """Return scores [A, W, V] whose softmax is the request's distribution; excluded tokens are -inf."""
    return apply(plan.filters, logits, rows.columns, proposed) if plan.filters else logits


def reported_scores(logits: Tensor, rows: Rows, plan: Plan, proposed: ProposedTokens | None) -> Tensor:
    """Return the scores [A, W, V] whose log-probs are reported: the model's own, or what rules of speech leave."""
    if not plan.reporting:
        return logits
    return torch.where(
        rows.columns["hears"][:, None, None], apply(plan.reporting, logits, rows.columns, proposed), logits
    )


def draft_transform(logits: Tensor, rows: Rows, plan: Plan, proposed: ProposedTokens | None) -> Tensor:
    """Transform at the draft's own temperature; the draft samples from the softmax of exactly these scores."""
    if not plan.own_draft:
        return transform(logits, rows, plan, proposed)
    scores = apply(plan.draft_filters, logits, at_the_drafts_own(rows.columns), proposed)
    return cut_to_depth(scores, rows.columns)


def apply(
    filters: Sequence[ReadingFilter], scores: Tensor, columns: Columns, proposed: ProposedTokens | None
) -> Tensor:
    cuts: list[Cut] = []
    for one in filters:
        if isinstance(one, Cut):
            cuts.append(one)
            continue
        assert isinstance(one, Change)
        scores, cuts = one.apply(keep_likeliest(scores, columns, cuts), columns, proposed), []
    return keep_likeliest(scores, columns, cuts)


def keep_likeliest(scores: Tensor, columns: Columns, cuts: Sequence[Cut]) -> Tensor:
    """Exclude tokens below the highest threshold. Each cut sees what earlier cuts have kept."""
    if not cuts:
        return scores
    kept = ordered = ascending(scores)  # [A, W, V]
    thresholds: list[Tensor] = []  # [A, W, 1] each; the highest decides
    for cut in cuts:
        if cut.reads_kept and thresholds:
            kept = cut_below(ordered, functools.reduce(torch.maximum, thresholds))
        thresholds.append(cut.threshold(ordered, kept, columns))
    return cut_below(scores, functools.reduce(torch.maximum, thresholds))


def ascending(scores: Tensor) -> Tensor:
    if on_host(scores.device):  # numpy's vectorised sort takes a tenth of torch's time
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1))
    return scores.sort(dim=-1).values
