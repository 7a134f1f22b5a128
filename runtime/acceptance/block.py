"""Block verification: the proposals of a row are judged together, which keeps more than to judge one by one.

Of a row's proposals x_1 … x_K, drawn from q_1 … q_K where the target has p_1 … p_K (arXiv 2403.10444):

    w_0 = 1, w_i = min(1, w_{i−1} · p_i(x_i) / q_i(x_i))
    r_i = Σ max(0, q_{i+1} − w_i · p_{i+1}), r_K = 1     1 − what w_{i+1} is on average
    x_i fails with probability (1 − w_i) / r_i           its complement is the paper's S / (S + 1 − w)

As many stand as the last one that does not fail has come to, whatever failed before it. Fewer than i stand if x_i fails
and no later one stands: (1 − w_i) / r_i · r_i, from the last back. So at least i stand with probability w_i, which is
never less than the product of min(1, p / q) of the test one by one; and what i that stand lack for the target's
distribution is norm(max(0, w_i · p_{i+1} − q_{i+1})). A certain proposal has q = 1. How many a row proposes may depend
on the proposals before, but not on those that it leaves out.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..state.verdict import BlockWeights

INFINITE = 1e30  # p / q of a proposal whose q is rounded to 0


class Chances(NamedTuple):
    """The distributions that a round's proposals come from and are judged by, and the uniforms that judge them."""

    p: Tensor  # [A, K+1, V]
    q: Tensor | None  # [A, K, V]; None: every proposal was certain
    p_chosen: Tensor  # [A, K], of the proposals
    q_chosen: Tensor  # [A, K]
    u: Tensor  # [A, K]


def judge_blocks(block: BlockWeights, chances: Chances, proposed: Tensor | None, out: Tensor) -> None:
    """Write how many proposals stand [A]; each row has K of them, or as many as `proposed` [A] says."""
    p, q, p_chosen, q_chosen, u = chances
    # log w lies as far below 0 as the sum of log(p / q) lies below the highest that it has been, 0 included.
    climb = p_chosen.div(q_chosen).clamp_(max=INFINITE).log_().cumsum(1, dtype=torch.float64)
    torch.exp(climb.sub_(climb.cummax(1).values.clamp_(min=0)), out=block.own)
    weights = block.inner.to(p.dtype)
    if q is None:
        torch.sub(1, p_chosen[:, 1:] * weights, out=block.inner_rests)
    else:
        rests = torch.addcmul(q[:, 1:], p[:, 1:-1], weights[:, :, None], value=-1).relu_()
        block.inner_rests.copy_(rests.sum(-1))
    # No rounding makes a rest more than 1, which would let through what the target excludes. One that is no number
    # is 1, too: the block ends before a law that is none, so that the draw from it is noticed if it comes to that.
    torch.fmin(block.rests, block.one, out=block.rests)
    if proposed is not None:
        end_blocks(block.rests, block.places, proposed)
    stands = passes(u, block.own, block.rests)
    if proposed is not None:
        stands.logical_and_(block.places <= proposed[:, None])
    count_standing(stands, block.places, out)


def share_of_q(block: BlockWeights, standing: Tensor) -> Tensor:
    """Return by what q counts [A] behind those that stand [A, 1]: p − q / w has the shape of w · p − q."""
    return block.weights.gather(1, standing)[:, 0].reciprocal_()


def end_blocks(rests: Tensor, places: Tensor, proposed: Tensor) -> None:
    """Let nothing follow each row's own last proposal."""
    rests.masked_fill_(places >= proposed[:, None], 1)


def passes(u: Tensor, weights: Tensor, rests: Tensor) -> Tensor:
    return (1 - u) * rests >= 1 - weights


def count_standing(stands: Tensor, places: Tensor, out: Tensor) -> None:
    """Write the place of the last that stands [A], 0 where none does."""
    torch.amax(stands * places, 1, out=out)
