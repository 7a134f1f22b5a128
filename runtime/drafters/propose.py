"""Fills a round with proposals; each row takes them from the source it asked for."""

import torch
from torch import Tensor

from ..round.frame import Frame
from ..round.plan import Plan
from ..round.rows import Rows
from ..sampling.acceptance import Noise, Proposal, inverse_cdf
from ..sampling.transform import draft_transform
from .drafter import Offer
from .siblings import hang_siblings


def propose(rows: Rows, plan: Plan, frame: Frame, noise: Noise, span: int) -> Proposal:
    """Return K tokens for every row, how many it proposes, and their q; every committed length is below `span`."""
    count, probabilities, entropies = frame.nothing, None, None
    if plan.samplers:
        count, probabilities, entropies = draw(rows, plan, frame, noise)  # and hang siblings
    if plan.draft_length:
        frame.line_up()
    alone = len(plan.sources) == 1
    for source in plan.copiers:
        offer = source.offer(rows, plan, frame, noise, span)
        if alone:
            frame.proposed.copy_(offer.tokens)
            count, probabilities = offer.proposed, offer.probabilities
        else:
            mine = source.asked(rows)[:, None] > 0
            probabilities = merge(offer, mine, frame, probabilities, plan)
            count = count + offer.proposed
    if frame.comb is not None:
        frame.comb.end_lines(count)
    return Proposal(frame.all_proposed, count, probabilities, entropies, frame.comb)


def merge(offer: Offer, mine: Tensor, frame: Frame, others: Tensor | None, plan: Plan) -> Tensor | None:
    """Put offered tokens into the rows `mine` [A, 1] that asked for them; return the q of all rows.

    `others` is the q of the other rows; None means that all their proposals were certain.
    """
    frame.proposed.copy_(torch.where(mine, offer.tokens, frame.proposed))
    if others is None and offer.probabilities is None:
        return None
    vocab_size = frame.target_logits.shape[2]
    q, rest = (
        one_hot(frame.proposed, vocab_size) if known is None else known for known in (offer.probabilities, others)
    )
    return torch.where(mine[:, :, None], q, rest)


def one_hot(tokens: Tensor, vocab_size: int) -> Tensor:
    return torch.zeros(*tokens.shape, vocab_size, device=tokens.device).scatter_(2, tokens[:, :, None], 1.0)


def draw(rows: Rows, plan: Plan, frame: Frame, noise: Noise) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Sample K tokens one after another, each by the request's transform and rule.

    Return how many each row proposes [A] and, if needed, their q [A, K, V] and the draft's entropies [A, K]. Sampling
    ends early if the host sees that too high an entropy has stopped all rows.
    """
    probabilities: list[Tensor] = []
    entropies: list[Tensor] = []
    found: list[Tensor] = []  # scores, which siblings are chosen by
    draws = None if noise.draw is None else noise.draw[:, :, None].unbind(1)
    each = [(source, source.logits(rows, frame)) for source in plan.samplers]
    for i, winners in enumerate(frame.winners):
        token = winners.tokens  # [A, 1]
        logits = each[0][1](i)  # [A, 1, V]
        for source, its_logits in each[1:]:
            logits = torch.where(source.asked(rows)[:, None, None] > 0, its_logits(i), logits)
        if plan.entropies:
            entropies.append(normalised_entropy(logits[:, 0]))
            if frame.on_cpu and bool((torch.cat(entropies, 1) > rows.entropy_limit[:, None]).any(1).all()):
                break
        scores = draft_transform(logits, rows, plan, drawn_so_far(i, plan, frame))
        if plan.probabilities:
            probabilities.append(scores.softmax(-1))
        if plan.siblings:
            found.append(scores.clone())  # else the next step may write there
        if plan.coupled:
            winners.pick(scores, None if noise.gumbel is None else noise.gumbel[:, i : i + 1])
        if plan.draws:
            assert draws is not None
            drawn = inverse_cdf(probabilities[-1][:, 0], draws[i])
            drawn.clamp_(max=scores.shape[2] - 1)  # NaN logits lead beyond the vocabulary
            token.copy_(torch.where(rows.coupled[:, None], token, drawn) if plan.coupled else drawn)
    count = each[0][0].asked(rows)
    for source, _ in each[1:]:
        count = count + source.asked(rows)
    sure = all_k(entropies, plan)
    if sure is not None:
        count = torch.minimum(count, (sure <= rows.entropy_limit[:, None]).cumprod(1).sum(1))
    q = all_k(probabilities, plan)
    if plan.siblings:
        every = all_k(found, plan)
        assert every is not None
        hang_siblings(rows, plan, frame, noise, every, q, count)
    return count, q, sure


def drawn_so_far(i: int, plan: Plan, frame: Frame) -> Tensor | None:
    """Return the first i proposals [A, i] if a filter reads them."""
    if not plan.reads_ahead:
        return None
    return torch.cat([winners.tokens for winners in frame.winners[:i]], 1) if i else frame.proposed[:, :0]


def all_k(parts: list[Tensor], plan: Plan) -> Tensor | None:
    """Join the parts [A, 1, …] of K proposals; ones, which nothing reads, stand for those never drawn."""
    missing = plan.draft_length - len(parts)
    return torch.cat(parts + [torch.ones_like(parts[0])] * missing, 1) if parts else None


def normalised_entropy(logits: Tensor) -> Tensor:
    """Return the entropy [A, 1] of the softmax of logits [A, V], scaled to lie from 0 to 1."""
    nats: Tensor = torch.special.entr(logits.softmax(-1)).sum(-1, keepdim=True)
    return nats / torch.full_like(nats, logits.shape[-1]).log_()
