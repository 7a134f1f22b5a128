"""Block verification judges the proposals of a row together, and keeps more of them than a test one by one.

Of a row's proposals x_1 … x_K, drawn from q_1 … q_K where the target has p_1 … p_K (arXiv 2403.10444):

    w_0 = 1, w_i = min(1, w_{i−1} · p_i(x_i) / q_i(x_i))
    r_i = Σ max(0, q_{i+1} − w_i · p_{i+1}), r_K = 1     1 − what w_{i+1} is on average
    x_i fails with probability (1 − w_i) / r_i           its complement is the paper's S / (S + 1 − w)

The last proposal that does not fail is accepted, and so are all before it, whether they failed or not. Fewer than i are
accepted if x_i fails and no later one is accepted: (1 − w_i) / r_i · r_i, by induction from the last back. So at least
i are accepted with probability w_i, which is never less than the product of min(1, p / q) in the test one by one. If i
are accepted, a draw from norm(max(0, w_i · p_{i+1} − q_{i+1})) completes the target's distribution. A certain proposal
has q = 1. How many tokens a row proposes may depend on the proposals before, but not on those that it leaves out.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..state.verdict import JointWeights

INFINITE = 1e30  # p / q of a proposal whose q is rounded to 0


class Chances(NamedTuple):
    """The distributions that a round's proposals come from and are judged by, and the uniforms that judge them."""

    p: Tensor  # [A, K+1, V]
    q: Tensor | None  # [A, K, V]; None: every proposal was certain
    p_chosen: Tensor  # [A, K], of the proposals
    q_chosen: Tensor  # [A, K]
    u: Tensor  # [A, K]


def judge_jointly(joint: JointWeights, chances: Chances, proposed: Tensor | None, out: Tensor) -> None:
    """Write how many proposals are accepted [A]; each row has K of them, or as many as `proposed` [A] says."""
    p, q, p_chosen, q_chosen, u = chances
    # log w lies as far below 0 as the sum of log(p / q) lies below the highest that it has been, 0 included.
    climb = p_chosen.div(q_chosen).clamp_(max=INFINITE).log_().cumsum(1, dtype=torch.float64)
    torch.exp(climb.sub_(climb.cummax(1).values.clamp_(min=0)), out=joint.own)
    weights = joint.inner.to(p.dtype)
    if q is None:
        torch.sub(1, p_chosen[:, 1:] * weights, out=joint.inner_rests)
    else:
        rests = torch.addcmul(q[:, 1:], p[:, 1:-1], weights[:, :, None], value=-1).relu_()
        joint.inner_rests.copy_(rests.sum(-1))
    # No rest exceeds 1, whatever the rounding: it would let through what the target excludes. NaN becomes 1 as well:
    # acceptance then ends before the broken distribution, and a draw from it is noticed.
    torch.fmin(joint.rests, joint.one, out=joint.rests)
    if proposed is not None:
        end_early(joint.rests, joint.places, proposed)
    passed = passes(u, joint.own, joint.rests)
    if proposed is not None:
        passed.logical_and_(joint.places <= proposed[:, None])
    count_accepted(passed, joint.places, out)


def share_of_q(joint: JointWeights, accepted: Tensor) -> Tensor:
    """Return the weight of q [A] after so many accepted proposals [A, 1]: p − q / w is proportional to w · p − q."""
    return joint.weights.gather(1, accepted)[:, 0].reciprocal_()


def end_early(rests: Tensor, places: Tensor, proposed: Tensor) -> None:
    """Let nothing follow each row's own last proposal."""
    rests.masked_fill_(places >= proposed[:, None], 1)


def passes(u: Tensor, weights: Tensor, rests: Tensor) -> Tensor:
    return (1 - u) * rests >= 1 - weights


def count_accepted(passed: Tensor, places: Tensor, out: Tensor) -> None:
    """Write the place of the last that is accepted [A], 0 where none is."""
    torch.amax(passed * places, 1, out=out)
