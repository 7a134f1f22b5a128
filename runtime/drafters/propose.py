"""Where proposals come from.

model   the draft model
lookup  a copy of what followed the same words earlier in the context
suffix  the same from longer matches and from earlier outputs, found on the host; see suffix.py
ngram   the n-grams counted from a text, in the place of a model
random  all tokens alike, in the place of a model: the floor that theory gives
cascade the draft model in one pass over what lookup finds; see cascade.py
none    nowhere
"""

import torch
from torch import Tensor

from ..lengths.entropy import normalised_entropy
from ..round.frame import Frame
from ..round.rows import Plan, Rows
from ..sampling.acceptance import Noise, Proposal, inverse_cdf
from ..sampling.transform import draft_transform
from .cascade import cascade

SOURCES = ("model", "lookup", "suffix", "ngram", "random", "cascade")
SAMPLED = ("model", "ngram", "random")  # from a distribution, one token after another
WITH_MODEL = ("model", "cascade")
DRAFTERS = (*SOURCES, "none")
LONGEST_MATCH = 4  # tokens of the suffix that lookup compares


def propose(rows: Rows, plan: Plan, frame: Frame, noise: Noise, span: int) -> Proposal:
    """Fill the frame with K tokens for every row from the source the row has chosen.

    `span` bounds the committed lengths.
    """
    count, probabilities, entropies = rows.from_model, None, None
    if plan.sampled:
        probabilities, entropies = draft(rows, plan, frame, noise)
    if plan.ngram:
        count = count + rows.from_ngram
    if plan.random:
        count = count + rows.from_random
    if entropies is not None:
        count = torch.minimum(count, (entropies <= rows.entropy_limit[:, None]).cumprod(1).sum(1))
    if plan.draft_length:
        frame.line_up()
    if plan.lookup or plan.cascade:
        copied, found = look_up(rows, plan, span)
    alone = not plan.sampled
    if plan.cascade:
        tokens, cascaded, q = cascade(rows, plan, frame, noise, copied, found)
        count = count + cascaded
        probabilities = put(tokens, rows.from_cascade, frame, probabilities, q, alone=alone)
        alone = False
    if plan.lookup:
        count = count + rows.from_lookup * found
        probabilities = put(copied, rows.from_lookup, frame, probabilities, alone=alone)
        alone = False
    if plan.suffix:
        count = count + rows.from_suffix
        suggested = rows.suggested[:, : plan.draft_length]
        probabilities = put(suggested, rows.from_suffix, frame, probabilities, alone=alone)
    return Proposal(frame.proposed, count, probabilities, entropies)


def put(
    tokens: Tensor, asked: Tensor, frame: Frame, others: Tensor | None, q: Tensor | None = None, *, alone: bool
) -> Tensor | None:
    """Let rows that asked for these tokens [A, K] propose them, all rows if alone; returns the q of all rows.

    `others` is what it is without them; where they have no `q` of their own they are certain.
    """
    if alone:
        frame.proposed.copy_(tokens)
        return q
    mine = asked[:, None] > 0
    frame.proposed.copy_(torch.where(mine, tokens, frame.proposed))
    if others is None:
        return None
    if q is None:
        q = torch.zeros_like(others).scatter_(2, frame.proposed[:, :, None], 1.0)
    return torch.where(mine[:, :, None], q, others)


def draft(rows: Rows, plan: Plan, frame: Frame, noise: Noise) -> tuple[Tensor | None, Tensor | None]:
    """Sample K tokens one after another, each by the request's transform and rule.

    Their q [A, K, V] and the entropies they were drawn at [A, K], each if needed. Where the host sees all rows stop at
    too high an entropy, the tokens after that are what an earlier round left there, and nobody proposes them.
    """
    probabilities: list[Tensor] = []
    entropies: list[Tensor] = []
    counts = rows.output_counts[:, None].clone() if plan.penalised else None  # [A, 1, V]
    draws = None if noise.draw is None else noise.draw[:, :, None].unbind(1)
    history = read_history(rows, frame) if plan.ngram else None
    for i, winners in enumerate(frame.drafted):
        token = winners.tokens  # [A, 1]
        logits = draft_logits(i, rows, plan, frame, history)  # [A, 1, V]
        if plan.entropies:
            entropies.append(normalised_entropy(logits[:, 0]))
            if frame.on_cpu and bool((torch.cat(entropies, 1) > rows.entropy_limit[:, None]).any(1).all()):
                break
        scores = draft_transform(logits, rows, plan, counts)
        if plan.probabilities:
            probabilities.append(scores.softmax(-1))
        if plan.coupled:
            winners.pick(scores, None if noise.gumbel is None else noise.gumbel[:, i : i + 1])
        if plan.rejection:
            assert draws is not None
            drawn = inverse_cdf(probabilities[-1][:, 0], draws[i])
            drawn.clamp_(max=scores.shape[2] - 1)  # beyond it where the draft's logits are NaN
            token.copy_(torch.where(rows.coupled[:, None], token, drawn) if plan.coupled else drawn)
        if counts is not None:
            counts.scatter_add_(2, token[:, None], torch.ones_like(counts[..., :1]))
    return whole(probabilities, plan), whole(entropies, plan)


def whole(parts: list[Tensor], plan: Plan) -> Tensor | None:
    """Of K proposals; those that were never drawn are likely enough to no one."""
    missing = plan.draft_length - len(parts)
    return torch.cat(parts + [torch.ones_like(parts[0])] * missing, 1) if parts else None


def draft_logits(i: int, rows: Rows, plan: Plan, frame: Frame, history: Tensor | None) -> Tensor:
    """What proposal i is drawn by [A, 1, V], each row's from its own source."""
    logits = frame.draft_logits
    if plan.model:
        frame.drafts[i].run()
        if plan.random:
            logits = torch.where(rows.from_random[:, None, None] > 0, 0.0, logits)
    if history is not None:
        assert frame.ngrams is not None
        proposed = (winners.tokens for winners in frame.drafted[:i])
        counted = frame.ngrams.after(torch.cat([history, *proposed], 1)[:, i:]).log()[:, None]
        logits = torch.where(rows.from_ngram[:, None, None] > 0, counted, logits)
    return logits


def read_history(rows: Rows, frame: Frame) -> Tensor:
    """The last committed tokens, as many as the longest n-gram looks back on; -1 before the first."""
    assert frame.ngrams is not None
    index = rows.length[:, None] + torch.arange(-frame.ngrams.longest, 0, device=rows.length.device)
    return rows.tokens.gather(1, index.clamp(min=0)).masked_fill_(index < 0, -1)


def look_up(rows: Rows, plan: Plan, span: int) -> tuple[Tensor, Tensor]:
    """Tokens [A, K] that followed the latest of the longest earlier matches of the context's end, and where one is.

    A match that ends less than K tokens ago goes on into its own copy, as repetition does.
    """
    context = rows.tokens[:, :span]  # [A, L]
    position = torch.arange(span, device=context.device)
    last = rows.length[:, None] - 1
    matched = (position < last).long()  # how many tokens ending at each position equal the suffix, plus one
    alive = matched.bool()
    for back in range(min(LONGEST_MATCH, span)):
        suffix = context.gather(1, (last - back).clamp(min=0))  # [A, 1]
        shifted = context if back == 0 else torch.nn.functional.pad(context[:, :-back], (back, 0), value=-1)
        alive = alive & (shifted == suffix) & (back <= last)
        matched = matched + alive
    best = (matched * span + position).argmax(1, keepdim=True)  # [A, 1]
    found = matched.gather(1, best)[:, 0] > 1
    period = last - best
    ahead = torch.arange(plan.draft_length, device=context.device) % period.clamp(min=1)
    return context.gather(1, (best + 1 + ahead).clamp(max=span - 1)), found
