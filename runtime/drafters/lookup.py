"""Drafter lookup copies what followed the same tokens earlier; in further lines of a row, what else followed them.

Earlier is the row's own text, and before that the tokens of its source, if it has one.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..state.frame import Frame
from ..state.plan import Plan
from ..state.proposal import Noise
from ..state.rows import Rows
from .drafter import Copier, Offer, of_turn

LONGEST_MATCH = 4  # tokens at the end of the context that are compared


class Lookup(Copier):
    name = "lookup"
    may_come_short = True
    has_copies = True

    def offer(self, rows: Rows, plan: Plan, frame: Frame, noise: Noise, span: int) -> Callable[[int], Offer]:
        copies = look_up(rows, plan, span, plan.lines_of(self))

        def of_line(line: int) -> Offer:
            tokens, found = (of_turn(each, rows, line) for each in zip(*copies, strict=True))
            return Offer(tokens, self.asked(line, rows) * found)

        return of_line


def look_up(rows: Rows, plan: Plan, span: int, copies: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Return the tokens [A, K] that followed the longest earlier match of the context's end, and which rows have one.

    The latest of several such matches counts, so that of equally long ones a row's text comes before its source. If it
    ends less than K tokens ago, the copy repeats itself. Each further copy is of the best match followed by a token
    that none before it begins with.
    """
    context, last = rows.tokens[:, :span], rows.length[:, None] - 1  # [A, L]
    if before := rows.source.shape[1]:
        context = torch.cat([rows.source, context], 1)
        span, last = span + before, last + before
    position = torch.arange(span, device=context.device)
    matched = (position < last).long()  # how many tokens ending at each position equal the suffix, plus one
    alive = matched.bool()
    for back in range(min(LONGEST_MATCH, span)):
        suffix = context.gather(1, (last - back).clamp(min=0))  # [A, 1]
        shifted = context if back == 0 else torch.nn.functional.pad(context[:, :-back], (back, 0), value=-1)
        alive = alive & (shifted == suffix) & (back <= last)
        matched = matched + alive
    following = context.roll(-1, 1) if copies > 1 else context
    steps, each = torch.arange(plan.draft_length, device=context.device), list[tuple[Tensor, Tensor]]()
    best: Tensor | None = None
    for _ in range(copies):
        if best is not None:
            matched = matched * (following != following.gather(1, best))
        best = (matched * span + position).argmax(1, keepdim=True)  # [A, 1]
        found = matched.gather(1, best)[:, 0] > 1
        ahead = steps % (last - best).clamp(min=1)
        copy = context.gather(1, (best + 1 + ahead).clamp(max=span - 1))
        each.append((copy.clamp(min=0) if before else copy, found))  # no token comes before a short source
    return each
