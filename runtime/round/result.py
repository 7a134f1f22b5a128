"""Copies a round's results to the host in one piece and reads them row by row."""

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

import numpy as np
import torch

from ...engines import EngineError
from ..requests.output import TokenLogprob, TracedRound, TracedSibling
from ..state.indexing import at_nodes, chosen, pick
from ..state.plan import Plan
from ..state.tree import CERTAIN, Tree
from ..state.verdict import best_of
from .round import Round


class RowResult(NamedTuple):
    accepted: int
    proposed: int
    beside: int  # how many of those accepted are not of its first line
    tokens: list[int]  # accepted proposals and the next token
    logprobs: list[TokenLogprob]
    trace: TracedRound | None
    entropies: tuple[float, ...]  # the draft's at each proposal


def tabulate(done: Round, plan: Plan) -> torch.Tensor:
    """Gather all that the host needs of a round in one tensor, one row per request."""
    parts = [done.verdict.table, *done.proposal.nodes.outcome(done.verdict)]
    if plan.entropies:
        assert done.proposal.entropies is not None
        parts.append(done.proposal.entropies)
    if plan.traced:
        parts += _trace_parts(done, plan)
    if plan.logprobs is not None:
        parts += _logprob_parts(done, plan.logprobs)
    # float64 holds every token id and every float32 exactly.
    return parts[0] if len(parts) == 1 else torch.cat([part.double() for part in parts], 1)


def read_table(
    table: torch.Tensor, plan: Plan, unchecked: torch.Tensor | torch.dtype | None, rows: Sequence[int]
) -> list[RowResult]:
    """Read these rows of a round's table.

    Check their next tokens by the target's logits, or by those of the type that the table holds; else the device has.
    """
    width, k, outcome = plan.draft_length + 1, plan.draft_length, 2 if plan.beyond else 0
    results = []
    if isinstance(unchecked, torch.dtype):
        table = table.cpu()  # else two copies
        unchecked = best_of(table, width, unchecked).float()
    numbers = None if unchecked is None else unchecked.numpy()
    listed = table.tolist()
    for index in rows:
        row = listed[index]
        accepted, proposed, at = int(row[0]), int(row[1]), 2 + width
        # The node after which the next token comes.
        last, beside = map(int, row[at : at + outcome] or (accepted, 0))
        tokens = list(map(int, row[2 : 3 + accepted]))
        if proposed < 0 or (numbers is not None and not _finite(numbers[index, last], tokens[-1])):
            raise EngineError(
                "the models' logits are NaN or infinite, as happens when a graph overflows in float16; "
                "export the pair in bfloat16 or float32"
            )
        trace, entropies, at = None, (), at + outcome
        if plan.entropies:
            entropies, at = tuple(row[at : at + proposed]), at + k
        if plan.traced:
            traced = Traced(row[at:], plan)
            at += traced.width
            trace = traced.round(accepted, tokens[-1], last, entropies)
        logprobs = [] if plan.logprobs is None else _logprobs(row[at:], tokens, width, plan.logprobs)
        results.append(RowResult(accepted, proposed, beside, tokens, logprobs, trace, entropies))
    return results


def _finite(logits: np.ndarray, token: int) -> bool:
    """Check the logit of a token, which is given alone or among those of all tokens."""
    return isfinite(logits) if logits.ndim == 0 else token < len(logits) and isfinite(logits.item(token))


def _trace_parts(done: Round, plan: Plan) -> list[torch.Tensor]:
    target, proposal = done.verdict.target_probabilities, done.proposal
    assert target is not None
    tokens, nodes = proposal.tokens, proposal.nodes
    links = nodes.links(tokens, proposal.proposed)
    next_token = done.verdict.tokens.gather(1, done.verdict.next_index)
    next_p = pick(target, done.verdict.last).gather(1, next_token)
    p, q = chosen(nodes.at_parents(target), tokens), torch.ones_like(tokens, dtype=target.dtype)
    if proposal.distributions is not None:
        drawn = chosen(at_nodes(proposal.distributions, links.distributions.clamp(min=0)), tokens)
        q = torch.where(links.distributions == CERTAIN, q, drawn)
    return [tokens, p, q, next_p, links.parents, links.turns, links.exists]


class Traced:
    """A round's proposals as a table holds them: token, p and q of each node, and their shape."""

    def __init__(self, row: Sequence[float], plan: Plan) -> None:
        nodes, self._k = plan.draft_length + plan.beyond, plan.draft_length
        self._tokens, self._p, self._q = (row[i * nodes : (i + 1) * nodes] for i in range(3))
        self._next_p, at = row[3 * nodes], 3 * nodes + 1
        self.width = at + 3 * nodes
        numbers = [int(number) for number in row[at : self.width]]
        self._parents, self._turns, self._exist = (numbers[i * nodes : (i + 1) * nodes] for i in range(3))

    def round(self, accepted: int, next_token: int, last: int, entropies: tuple[float, ...]) -> TracedRound:
        own = slice(sum(self._exist[: self._k]))
        proposal, p, q = tuple(map(int, self._tokens[own])), tuple(self._p[own]), tuple(self._q[own])
        beside = self._beside(proposal, self._said(last))
        return TracedRound(proposal, accepted, next_token, p, q, self._next_p, entropies, beside)

    def _said(self, node: int) -> tuple[int, ...]:
        """Return the tokens of the path to a node."""
        return tuple(int(self._tokens[each - 1]) for each in Tree.path_to(node, self._parents))

    def _beside(self, line: tuple[int, ...], accepted: tuple[int, ...]) -> tuple[TracedSibling, ...]:
        """Read what is beside the first line, level by level; what was proposed twice is given once."""
        nodes = (node for node in range(self._k + 1, len(self._exist) + 1) if self._exist[node - 1])
        paths = {node: self._said(node) for node in nodes}
        found: dict[tuple[int, ...], TracedSibling] = {}
        places: dict[tuple[int, ...], int] = {}  # in `found`, of nodes that others follow
        for node, path in sorted(paths.items(), key=lambda one: (len(one[1]), self._turns[one[0] - 1])):
            if path not in found and path != line[: len(path)]:
                stands, after = path == accepted[: len(path)], places.get(path[:-1])
                places[path] = len(places)
                found[path] = TracedSibling(
                    len(path) - 1, path[-1], self._p[node - 1], self._q[node - 1], stands, after
                )
        return tuple(found.values())


def token_logprobs(logits: torch.Tensor, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
    """Return the log-probabilities of `tokens` [S] and of the likeliest ones by `logits` [S, V]."""
    logprobs = logits.log_softmax(-1)
    likeliest = logprobs.topk(min(top, logits.shape[1]), -1)
    chosen = logprobs.gather(1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0].tolist()
    each = zip(tokens, chosen, likeliest.indices.tolist(), likeliest.values.tolist(), strict=True)
    return [TokenLogprob(token, own, tuple(zip(ids, values, strict=True))) for token, own, ids, values in each]


def _logprob_parts(done: Round, top: int) -> list[torch.Tensor]:
    logprobs = done.proposal.nodes.along(done.reported, done.verdict).log_softmax(-1)  # [A, K+1, V]
    likeliest = logprobs.topk(top, -1)
    chosen = logprobs.gather(2, done.verdict.tokens[:, :, None])[:, :, 0]
    return [chosen, likeliest.indices.flatten(1), likeliest.values.flatten(1)]


def _logprobs(row: list[float], tokens: list[int], width: int, top: int) -> list[TokenLogprob]:
    ids, values = row[width : width + width * top], row[width + width * top :]
    return [
        TokenLogprob(
            token,
            row[i],
            tuple((int(ids[i * top + j]), values[i * top + j]) for j in range(top)),
        )
        for i, token in enumerate(tokens)
    ]
