"""One round of speculation for a whole batch, on CPU and GPU alike; `plain.py` says the same for one row."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..acceptance.accept import accept, flag_no_numbers
from ..acceptance.transform import reported_scores, transform
from ..state.clock import Clock
from ..state.frame import Frame
from ..state.noise import gumbels
from ..state.plan import Plan
from ..state.proposal import Exam, Noise, Proposal
from ..state.rows import Rows
from ..state.verdict import Verdict
from .propose import propose


class Round(NamedTuple):
    """The result of a round, still on the device."""

    proposal: Proposal
    verdict: Verdict
    reported: Tensor  # [A, N+1, V] scores of the target whose log-probs are reported


def run_round(rows: Rows, plan: Plan, frame: Frame, span: int, clock: Clock) -> Round:
    """Advance every row by one to K+1 tokens; before the round every committed length is below `span`."""
    clock.mark(0)
    frame.begin(rows)
    noise = draw_noise(rows, plan, frame)
    clock.mark(1)
    proposal = propose(rows, plan, frame, noise, span)
    if plan.ragged:  # else the frame knows them
        torch.add(proposal.proposed, 1, out=frame.widths)
    clock.mark(2)
    frame.verify.run()
    clock.mark(3)
    proposed = proposal.before_target if plan.reads_proposals else None
    scores = transform(frame.target_logits, rows, plan, proposed)
    logprobs_of = reported_scores(frame.target_logits, rows, plan, proposed)
    accept(Exam(proposal, scores, rows, plan, noise, frame.verdict))
    if frame.unchecked is None:
        flag_no_numbers(frame.target_logits, frame.verdict)
    commit(rows, plan, frame)
    clock.mark(4)
    return Round(proposal, frame.verdict, logprobs_of)


def draw_noise(rows: Rows, plan: Plan, frame: Frame) -> Noise:
    gumbel = draw = test = beyond = None
    if plan.gumbel:
        vocab_size = frame.target_logits.shape[2]
        gumbel = gumbels(rows.seed, frame.index, vocab_size) * rows.noise_scale[:, None, None]
    if plan.draws:
        draw, test, beyond = rows.round_uniforms()
    return Noise(gumbel, draw, test, beyond)


def commit(rows: Rows, plan: Plan, frame: Frame) -> None:
    """Write the round's tokens and advance each length: this is commit and rollback in one."""
    verdict = frame.verdict
    frame.settle()
    rows.tokens.scatter_(1, frame.index, verdict.tokens)
    torch.add(frame.next_length, verdict.accepted, out=rows.length)
    for one in plan.filters:
        one.commit(rows.columns, verdict.tokens, verdict.accepted)
    for drafter in plan.looking_ahead:
        drafter.keep(rows, frame)
