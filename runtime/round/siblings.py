"""Hangs siblings beside a line of sampled proposals, where they are most likely to be needed.

coupled:   a token that the draft nearly picked, by its score with the same noise. The noise may choose tokens and
           places, because the target's own pick decides.
rejection: a token drawn as the line's was, from what is left of q. Its place is chosen without a look at it.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..acceptance.one_line import inverse_cdf
from ..state.frame import Frame
from ..state.indexing import counting
from ..state.noise import MOST_SIBLINGS, of_rank
from ..state.plan import Plan
from ..state.proposal import Noise
from ..state.rows import Rows

REACHED, NEEDED = 0.75, 0.5  # shares: of places from which the next one is reached; of siblings that fail


class Candidates(NamedTuple):
    """Siblings that may be hung, best first at each place, and how likely each is to be needed; 0 excludes one."""

    tokens: Tensor  # [A, K, R]
    worth: Tensor  # [A, K, R]


def hang_siblings(
    rows: Rows, plan: Plan, frame: Frame, noise: Noise, scores: Tensor | None, q: Tensor | None, proposed: Tensor
) -> None:
    """Choose siblings by the draft's scores with noise, or by q, both [A, K, V], for lines of `proposed` [A] tokens."""
    tree, line = frame.tree, torch.cat([one.tokens for one in frame.winners], 1)  # [A, K]
    assert tree is not None
    found = None
    if plan.coupled:
        assert scores is not None
        found = nearly_picked(scores, line, plan.ranks)
    if plan.draws:
        assert q is not None
        assert noise.beyond is not None
        drawn = drawn_without_replacement(q, line, noise.beyond[..., 0], plan.ranks)
        if found is None:
            found = drawn
        else:
            own = rows.coupled[:, None, None]
            found = Candidates(*(torch.where(own, ours, others) for ours, others in zip(found, drawn, strict=True)))
    assert found is not None
    reached = counting(plan.draft_length, line.device) < proposed[:, None]
    worth, index = (found.worth * reached[:, :, None]).flatten(1).topk(plan.siblings)
    frame.siblings.copy_(found.tokens.flatten(1).gather(1, index))
    wanted = counting(plan.siblings, line.device) < rows.siblings[:, None]
    tree.hang(index // plan.ranks, index % plan.ranks + 1, (worth > 0) & wanted, rows.siblings > 0)


def nearly_picked(scores: Tensor, line: Tensor, ranks: int) -> Candidates:
    """Return the runners-up of the draft's picks, as likely as the softmax of their scores says; uses up the scores.

    The softmax is over as many as a place may ever have, so that a row's own do not depend on its neighbours'.
    """
    picked = line[:, :, None]
    best = scores.gather(2, picked)
    values, tokens = scores.scatter_(2, picked, -torch.inf).topk(min(MOST_SIBLINGS, scores.shape[2]))
    shares = torch.cat([best, values], 2).softmax(-1)
    reached = shares[:, :, 0].cumprod(1).roll(1, 1)
    reached[:, 0] = 1
    return Candidates(tokens[:, :, :ranks], shares[:, :, 1 : 1 + ranks] * reached[:, :, None])


def drawn_without_replacement(q: Tensor, line: Tensor, u: Tensor, ranks: int) -> Candidates:
    """Draw from q [A, K, V] without the tokens that are there, by uniforms u [A, 3 · 16]."""
    left, last = q, line[:, :, None]
    batch, length, vocab_size = q.shape
    tokens, exist = [], []
    for rank in range(ranks):
        left = left.scatter(2, last, 0.0)
        last = inverse_cdf(left.flatten(0, 1), u[:, of_rank(rank + 1, length)].reshape(-1, 1)).view(batch, length, 1)
        last.clamp_(max=vocab_size - 1)  # an empty rest and NaN logits lead beyond the vocabulary
        tokens.append(last)
        exist.append(left.gather(2, last) > 0)
    return Candidates(torch.cat(tokens, 2), worth_unseen(length, ranks, q.device) * torch.cat(exist, 2))


@cache
def worth_unseen(length: int, ranks: int, device: torch.device) -> Tensor:
    """Return how likely siblings [K, R] are to be needed, as far as that is known before they are drawn."""
    return REACHED ** counting(length, device)[:, None] * NEEDED ** counting(ranks, device)
