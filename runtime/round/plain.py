"""One round of speculation in the words of the papers: one row, one line, float64. `round.py` is this for a batch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Model = Callable[[Sequence[int]], Tensor]  # the distribution [V] of the token after these tokens


class Luck(NamedTuple):
    """The randomness of a round of K proposals."""

    draw: Callable[[Tensor, int], int]  # a token from a distribution [V] by number i: 0 … K − 1 are the proposals'
    test: Sequence[float]  # a uniform in (0, 1) for each proposal


def run_plain_round(tokens: Sequence[int], k: int, draft: Model, target: Model, rule: str, luck: Luck) -> list[int]:
    """Return the tokens that the round appends: the proposals that it accepts, and one more of the target's."""
    proposals: list[int] = []
    q: list[Tensor] = []
    for i in range(k):  # the draft proposes one token after another
        q.append(draft([*tokens, *proposals]))
        proposals.append(luck.draw(q[i], i))
    p = [target([*tokens, *proposals[:i]]) for i in range(k + 1)]  # the real target computes these in one pass
    accepted, token = RULES[rule](proposals, p, q, luck)
    return [*proposals[:accepted], token]


def tokenwise(proposals: Sequence[int], p: Sequence[Tensor], q: Sequence[Tensor], luck: Luck) -> tuple[int, int]:
    """Accept x while u · q(x) < p(x); where one is rejected, draw from max(0, p − q) (arXiv 2211.17192)."""
    for i, x in enumerate(proposals):
        if luck.test[i] * q[i][x] >= p[i][x]:
            return i, luck.draw((p[i] - q[i]).clamp(min=0), len(proposals))
    return len(proposals), luck.draw(p[-1], len(proposals))


def rejection(proposals: Sequence[int], p: Sequence[Tensor], q: Sequence[Tensor], luck: Luck) -> tuple[int, int]:
    """Judge the proposals together, so that a later one may save those before it (block verification, 2403.10444)."""
    k, accepted = len(proposals), 0
    weights = [torch.ones((), dtype=torch.float64)]  # at least i are accepted with probability weights[i]
    for i, x in enumerate(proposals, 1):
        weights.append((weights[-1] * p[i - 1][x] / q[i - 1][x]).clamp(max=1))
        rest = (q[i] - weights[i] * p[i]).clamp(min=0).sum() if i < k else 1.0
        if (1 - luck.test[i - 1]) * rest >= 1 - weights[i]:
            accepted = i
    remaining = (weights[accepted] * p[accepted] - q[accepted]).clamp(min=0) if accepted < k else p[k]
    return accepted, luck.draw(remaining, k)


def coupled(proposals: Sequence[int], p: Sequence[Tensor], q: Sequence[Tensor], luck: Luck) -> tuple[int, int]:
    """Accept x while the target draws it too from number i. Greedy decoding draws the likeliest instead."""
    own = [luck.draw(distribution, i) for i, distribution in enumerate(p)]
    accepted = next((i for i, x in enumerate(proposals) if own[i] != x), len(proposals))
    return accepted, own[accepted]


RULES = {"rejection": rejection, "tokenwise": tokenwise, "coupled": coupled}
