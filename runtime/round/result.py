"""Copies a round's results to the host in one piece and reads them row by row."""

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

import numpy as np
import torch

from ...engines import EngineError
from ..requests.output import TokenLogprob, TracedRound, TracedSibling
from ..sampling.acceptance import chosen
from ..sampling.combs import at_nodes
from .plan import Plan
from .round import Round
from .rows import pick


class RowResult(NamedTuple):
    accepted: int
    proposed: int
    on_line: int  # of the accepted, those that are no siblings
    tokens: list[int]  # accepted proposals and the next token
    logprobs: list[TokenLogprob]
    trace: TracedRound | None
    entropies: tuple[float, ...]  # the draft's at each proposal


def tabulate(done: Round, plan: Plan) -> torch.Tensor:
    """Gather all that the host needs of a round in one tensor, one row per request."""
    parts = [done.verdict.table]
    if plan.siblings:
        parts.append(done.verdict.last[:, None])
    if plan.entropies:
        assert done.proposal.entropies is not None
        parts.append(done.proposal.entropies)
    if plan.traced:
        parts += _trace_parts(done, plan)
    if plan.logprobs is not None:
        parts += _logprob_parts(done, plan.logprobs)
    # float64 holds every token id and every float32 exactly.
    return parts[0] if len(parts) == 1 else torch.cat([part.double() for part in parts], 1)


def read_table(table: torch.Tensor, plan: Plan, logits: torch.Tensor | None = None) -> list[RowResult]:
    """Read a round's table; check the next tokens by the target's `logits` if given, else the device has done it."""
    width = plan.draft_length + 1
    results = []
    numbers = None if logits is None else logits.numpy()
    for index, row in enumerate(table.tolist()):
        accepted, proposed, at = int(row[0]), int(row[1]), 2 + width
        last = int(row[at]) if plan.siblings else accepted  # the node after which the next token comes
        tokens = [int(token) for token in row[2 : 3 + accepted]]
        if proposed < 0 or (numbers is not None and not _finite(numbers[index, last], tokens[-1])):
            raise EngineError(
                "the models' logits are NaN or infinite, as happens when a graph overflows in float16; "
                "export the pair in bfloat16 or float32"
            )
        trace, entropies, k, on_line = None, (), width - 1, accepted
        if plan.siblings:
            on_line, at = accepted - (last != accepted), at + 1
        if plan.entropies:
            entropies, at = tuple(row[at : at + proposed]), at + k
        if plan.traced:
            nodes = k + plan.siblings
            each = [row[at + i * nodes : at + (i + 1) * nodes] for i in range(3)]
            at += 3 * nodes + 1
            proposal, p, q = (tuple(part[:proposed]) for part in each)
            traced = tuple(map(int, proposal)), accepted, tokens[-1], p, q, row[at - 1], entropies
            trace = TracedRound(*traced, _siblings(each, row[at : at + 2 * plan.siblings], k, last))
            at += 2 * plan.siblings
        logprobs = _logprobs(row[at:], tokens, width, plan.logprobs)
        results.append(RowResult(accepted, proposed, on_line, tokens, logprobs, trace, entropies))
    return results


def _finite(logits: np.ndarray, token: int) -> bool:
    return token < len(logits) and isfinite(logits.item(token))


def _trace_parts(done: Round, plan: Plan) -> list[torch.Tensor]:
    target, proposal = done.verdict.target_probabilities, done.proposal
    assert target is not None
    tokens = proposal.tokens
    next_token = done.verdict.tokens.gather(1, done.verdict.next_index)
    next_p = pick(target, done.verdict.last).gather(1, next_token)
    if proposal.comb is None:
        return [tokens, chosen(target, tokens), chosen(proposal.probabilities, tokens), next_p]
    comb, q = proposal.comb, proposal.probabilities
    ranks = comb.ranks * comb.exists[:, plan.draft_length :]
    p = chosen(at_nodes(target, comb.parents), tokens)
    q = chosen(q if q is None else at_nodes(q, comb.parents), tokens)
    return [tokens, p, q, next_p, comb.places, ranks]


def _siblings(each: Sequence[Sequence[float]], shape: Sequence[float], k: int, last: int) -> tuple[TracedSibling, ...]:
    """Read tokens, p and q of all nodes, and places and ranks of the siblings; rank 0: there is none."""
    count = len(shape) // 2
    found = [
        (shape[i], shape[count + i], TracedSibling(int(shape[i]), int(token), p, q, last == k + i + 1))
        for i, (token, p, q) in enumerate(zip(*(part[k:] for part in each), strict=True))
        if shape[count + i]
    ]
    return tuple(one for _, _, one in sorted(found, key=lambda one: one[:2]))


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log-probabilities of `tokens` [S] and of the likeliest ones by `logits` [S, V]."""
    logprobs = logits.log_softmax(-1)
    likeliest = logprobs.topk(min(top, logits.shape[1]), -1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    each = zip(tokens, chosen, likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return [TokenLogprob(token, own, tuple(zip(ids, values, strict=True))) for token, own, ids, values in each]


def _logprob_parts(done: Round, top: int) -> list[torch.Tensor]:
    logprobs = done.verdict.along(done.logits).log_softmax(-1)  # [A, K+1, V]
    likeliest = logprobs.topk(top, -1)
    chosen = logprobs.gather(2, done.verdict.tokens[:, :, None])[:, :, 0]
    return [chosen, likeliest.indices.flatten(1), likeliest.values.flatten(1)]


def _logprobs(row: list[float], tokens: list[int], width: int, top: int | None) -> list[TokenLogprob]:
    if top is None:
        return []
    ids, values = row[width : width + width * top], row[width + width * top :]
    return [
        TokenLogprob(
            token,
            row[i],
            tuple((int(ids[i * top + j]), values[i * top + j]) for j in range(top)),
        )
        for i, token in enumerate(tokens)
    ]
