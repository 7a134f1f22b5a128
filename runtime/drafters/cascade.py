"""A free draft proposes to the draft model, and what comes of that exact test proposes to the target.

One pass of the draft model judges what lookup copied, as the target judges any proposal. The accepted tokens and the
one that follows them are therefore distributed as those the draft model would have sampled one by one.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ..round.frame import Frame
from ..round.rows import Plan, Rows
from ..sampling.acceptance import Noise, Proposal, accept
from ..sampling.transform import counts_at_each_position, draft_transform


def cascade(
    rows: Rows, plan: Plan, frame: Frame, noise: Noise, copied: Tensor, found: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Tokens [A, K], how many of them a row proposes [A], and their q [A, K, V] if needed, of rows that cascade.

    The other rows are fed what they propose already, so that the pass leaves in their caches what it finds there.
    """
    k, step, verdict = plan.draft_length, frame.cascade, frame.cascaded
    ours = rows.from_cascade > 0
    guesses = torch.where(ours[:, None], copied[:, : k - 1], frame.proposed[:, : k - 1])
    torch.cat([frame.recent, guesses], 1, out=step.input_ids)
    step.run()
    inner = replace(plan, draft_length=k - 1, ragged=True, lenient=False)
    proposal = Proposal(guesses, (rows.from_cascade - 1).clamp(min=0) * found, None)
    counts = counts_at_each_position(rows, inner, proposal)
    scores = draft_transform(frame.cascade_logits, rows, inner, counts)
    # The uniforms that would draw the draft's tokens one by one: the first draws, the others test. Those of the outer
    # test are others. The noise of the coupled rule is that of the index in both tests.
    gumbel = None if noise.gumbel is None else noise.gumbel[:, :k]
    draw, test = (None, None) if noise.draw is None else (noise.draw[:, :1], noise.draw[:, 1:])
    accept(proposal, scores, rows, inner, Noise(gumbel, draw, test), verdict)
    verdict.tokens.clamp_(max=scores.shape[2] - 1)  # beyond it where the draft's logits are NaN
    return verdict.tokens, torch.where(ours, verdict.accepted + 1, 0), verdict.target_probabilities
