"""Fills a round with proposals; each row takes them from the drafter it asked for."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..acceptance.sums import inverse_cdf
from ..acceptance.transform import draft_transform
from ..drafters.drafter import Copier, Offer, Sampler
from ..state.frame import DraftedLine, Frame
from ..state.plan import Plan
from ..state.proposal import Noise, Proposal, ProposedTokens
from ..state.rows import Rows
from .growth import NOTHING_GROWS, Branches, Growth, all_k


class Drawn(NamedTuple):
    """The proposals of one line: how many of them each row has [A], their q [A, K, V] and entropies [A, K]."""

    proposed: Tensor
    probabilities: Tensor | None = None  # None: every proposal was certain
    entropies: Tensor | None = None


def propose(rows: Rows, plan: Plan, frame: Frame, noise: Noise, span: int) -> Proposal:
    """Return K tokens for each line of every row, how many it proposes, and their q; every length is below `span`."""
    if not plan.draft_length:
        return Proposal(frame.all_proposed, frame.nothing, None)
    nodes, growth = frame.nodes, Branches(rows, plan, frame, noise) if plan.branches else NOTHING_GROWS
    nodes.begin()
    lines = [Drawn(frame.nothing) for _ in plan.lines]
    for number in reversed(range(len(lines))):  # the first writes its branches over what is no line of their rows
        if plan.samplers[number]:
            lines[number] = draw(rows, plan, frame, noise, number, NOTHING_GROWS if number else growth)
        frame.lines[number].line_up()
    for drafter in plan.copiers:
        offer = cast(Copier, drafter).offer(rows, plan, frame, noise, span)
        for number, drafters in enumerate(plan.lines):
            if drafter in drafters:
                lines[number] = add(offer(number), drafter.asked(number, rows), lines[number], number, plan, frame)
    proposed, q, entropies = lines[0]
    for number, line in enumerate(lines):
        nodes.end_line(number, line.proposed)
    distributions = [line.probabilities for line in lines if line.probabilities is not None]
    distributions += growth.distributions
    joined = torch.cat(distributions, 1) if len(distributions) > 1 else distributions[0] if distributions else None
    return Proposal(frame.all_proposed, proposed, q, entropies, nodes, joined)


def add(offer: Offer, asked: Tensor, drawn: Drawn, number: int, plan: Plan, frame: Frame) -> Drawn:
    """Put offered tokens into a line of the rows that `asked` [A] for them; the others keep what was drawn."""
    proposed = frame.lines[number].proposed
    if len(plan.lines[number]) == 1 and not (number and plan.branches):
        proposed.copy_(offer.tokens)
        return Drawn(offer.proposed, offer.probabilities)
    probabilities = merge(offer, asked[:, None] > 0, proposed, drawn.probabilities, frame)
    return drawn._replace(proposed=drawn.proposed + offer.proposed, probabilities=probabilities)


def merge(offer: Offer, mine: Tensor, proposed: Tensor, others: Tensor | None, frame: Frame) -> Tensor | None:
    """Put offered tokens into the rows `mine` [A, 1] of those `proposed` [A, K]; return the q of all rows.

    `others` is the q of the other rows; None means that all their proposals were certain.
    """
    proposed.copy_(torch.where(mine, offer.tokens, proposed))
    if others is None and offer.probabilities is None:
        return None
    vocab_size = frame.target_logits.shape[2]
    q, rest = (one_hot(proposed, vocab_size) if known is None else known for known in (offer.probabilities, others))
    return torch.where(mine[:, :, None], q, rest)


def one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    return torch.zeros(*tokens.shape, vocab_size, device=tokens.device).scatter_(2, tokens[:, :, None], 1.0)


def draw(rows: Rows, plan: Plan, frame: Frame, noise: Noise, number: int, growth: Growth) -> Drawn:
    """Sample K tokens of a line one after another, each by the request's transform and rule; growth is beside it.

    Sampling ends early if the host sees that too high an entropy has stopped all rows.
    """
    line, samplers = frame.lines[number], plan.samplers[number]
    probabilities: list[Tensor] = []
    entropies: list[Tensor] = []
    uniforms = noise.to_draw(number, plan.draft_length)
    draws = None if uniforms is None else uniforms[:, :, None].unbind(1)
    drafters = cast(Sequence[Sampler], samplers)
    each = [(one.asked(number, rows), one.logits(rows, frame, line)) for one in drafters]
    count, entropic = each[0][0], plan.entropies and not number
    for i, winners in enumerate(line.winners):
        token = winners.tokens  # [A, 1]
        logits = each[0][1](i)  # [A, 1, V]; of a tree [A, P, V], after the line's own token and others of its level
        for asked, its_logits in each[1:]:
            logits = torch.where(asked[:, None, None] > 0, its_logits(i), logits)
        if entropic:
            doubts = [one.doubt(i, logits, frame, line) for one in drafters]
            for (asked, _), doubt in zip(each[1:], doubts[1:], strict=True):
                doubts[0] = torch.where(asked[:, None] > 0, doubt, doubts[0])
            entropies.append(doubts[0])
            if frame.on_host and bool((torch.cat(entropies, 1) > rows.entropy_limit[:, None]).any(1).all()):
                break
        scores = draft_transform(logits, rows, plan, drawn_so_far(i, plan, frame, line))
        distributions = scores.softmax(-1) if plan.probabilities else None
        if distributions is not None:
            probabilities.append(distributions[:, :1])
        if plan.coupled:
            gumbel = None if noise.gumbel is None else noise.gumbel[:, i : i + 1]
            if scores.shape[1] > 1 and gumbel is not None:
                scores, gumbel = scores + gumbel, None
            picked = winners.pick(scores if scores.shape[1] == 1 else scores[:, :1], gumbel)
            scores = picked if scores.shape[1] == 1 else scores
        if plan.draws:
            assert draws is not None
            drawn = inverse_cdf(probabilities[-1][:, 0], draws[i])
            drawn.clamp_(max=scores.shape[2] - 1)  # NaN logits lead beyond the vocabulary
            token.copy_(torch.where(rows.coupled[:, None], token, drawn) if plan.coupled else drawn)
        growth.follow(i, token, scores, distributions)
    for asked, _ in each[1:]:
        count = count + asked
    sure = all_k(entropies, plan)
    if sure is not None:
        count = torch.minimum(count, (sure <= rows.entropy_limit[:, None]).cumprod(1).sum(1))
    q = all_k(probabilities, plan)
    growth.end(count, q)
    return Drawn(count, q, sure)


def drawn_so_far(i: int, plan: Plan, frame: Frame, line: DraftedLine) -> ProposedTokens | None:
    """Return the first i proposals [A, i], or what has grown so far, if a filter reads them."""
    if not plan.reads_proposals:
        return None
    if i < len(line.levels):
        return ProposedTokens(frame.all_proposed, frame.nodes, line.levels[i])
    return ProposedTokens(torch.cat([winners.tokens for winners in line.winners[:i]], 1) if i else line.proposed[:, :0])
