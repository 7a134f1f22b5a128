"""The share of siblings that are accepted, from the logits of two models: the gain of a comb over its line."""

import torch
from torch import Tensor

from ...runtime.acceptance.descent import what_is_left, without
from ...runtime.acceptance.sums import inverse_cdf

DRAWS = 8  # of the tokens that are not accepted, at each position
ROWS = 64  # positions at a time


def sibling_acceptance(target: Tensor, draft: Tensor, temperature: float, most: int = 3) -> list[float]:
    """Return for sibling 1 … `most` how often it is accepted and none before it: by `rejection`, at 0 the greedy rule.

    Of logits [L, V] each. A sibling is tested after a token that is drawn from those that are not accepted.
    """
    vocab = min(target.shape[1], draft.shape[1])
    target, draft = target[:, :vocab], draft[:, :vocab]
    if temperature == 0:
        best: Tensor = draft.topk(min(most + 1, vocab)).indices == target.argmax(-1)[:, None]
        return [float(share) for share in best.double().mean(0)[1:]]
    total, random = torch.zeros(most + 1, dtype=torch.float64), torch.Generator().manual_seed(0)
    for ours, theirs in zip(torch.split(target, ROWS), torch.split(draft, ROWS), strict=True):
        p, q = ((logits.double() / temperature).softmax(-1) for logits in (ours, theirs))
        for _ in range(DRAWS):
            distribution, left, failed = p, q, torch.ones(len(p), dtype=torch.float64)
            for rank in range(most + 1):
                accepted = torch.minimum(distribution, left).sum(-1)
                total[rank] += (failed * accepted).sum()
                failed = failed * (1 - accepted)
                u = torch.rand(len(p), 1, generator=random, dtype=torch.float64)
                fallen = inverse_cdf((left - distribution).relu(), u).clamp_(max=vocab - 1)
                distribution, left = what_is_left(distribution, left), without(left, fallen)
    return (total[1:] / (DRAWS * len(target))).tolist()
