"""Drafter lookup copies what followed the same tokens earlier; lookup2 and its like copy other continuations."""

import torch
from torch import Tensor

from ..state.frame import Frame
from ..state.plan import Plan
from ..state.proposal import Noise
from ..state.rows import Rows
from .drafter import Copier, Offer, continuations

LONGEST_MATCH = 4  # tokens at the end of the context that are compared


class Lookup(Copier):
    name = "lookup"
    may_come_short = True

    def offer(self, rows: Rows, plan: Plan, frame: Frame, noise: Noise, span: int) -> Offer:
        copied, found = look_up(rows, plan, span, len(self.before))
        return Offer(copied, self.asked(rows) * found)


def further_lookup(number: int) -> type[Lookup]:
    """Make the drafter of continuation `number`, counted from 1."""
    *better, own = continuations(Lookup.name, number)

    class FurtherLookup(Lookup):
        name = own
        before = tuple(better)

    return FurtherLookup


def look_up(rows: Rows, plan: Plan, span: int, better: int = 0) -> tuple[Tensor, Tensor]:
    """Return the tokens [A, K] that followed the longest earlier match of the context's end, and which rows have one.

    The latest of several such matches counts. If it ends less than K tokens ago, the copy repeats itself. Beside
    `better` continuations, it is the best match followed by a token that none of them begins with.
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
    following = context.roll(-1, 1) if better else context
    for _ in range(better):
        matched = matched * (following != following.gather(1, best))
        best = (matched * span + position).argmax(1, keepdim=True)
    found = matched.gather(1, best)[:, 0] > 1
    period = last - best
    ahead = torch.arange(plan.draft_length, device=context.device) % period.clamp(min=1)
    return context.gather(1, (best + 1 + ahead).clamp(max=span - 1)), found
