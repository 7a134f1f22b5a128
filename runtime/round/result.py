"""Copies a round's results to the host in one piece and reads them row by row."""

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple

import numpy as np
import torch

from ...engines import EngineError
from ..acceptance.one_line import chosen
from ..requests.output import TokenLogprob, TracedRound, TracedSibling
from ..state.indexing import at_nodes, pick
from ..state.plan import Plan
from ..state.proposal import Proposal
from ..state.tree import Tree
from ..state.verdict import TreeVerdict
from .round import Round


class RowResult(NamedTuple):
    accepted: int
    proposed: int
    beside: int  # how many of those accepted are siblings or branches, in a row that has some
    tokens: list[int]  # accepted proposals and the next token
    logprobs: list[TokenLogprob]
    trace: TracedRound | None
    entropies: tuple[float, ...]  # the draft's at each proposal


def tabulate(done: Round, plan: Plan) -> torch.Tensor:
    """Gather all that the host needs of a round in one tensor, one row per request."""
    parts = [done.verdict.table]
    if plan.is_tree:
        parts.append(done.verdict.last[:, None])
    if plan.branches:
        assert isinstance(done.verdict, TreeVerdict)
        parts.append((done.verdict.path > plan.draft_length).sum(1, keepdim=True))
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
    width, k = plan.draft_length + 1, plan.draft_length
    results = []
    numbers = None if logits is None else logits.numpy()
    for index, row in enumerate(table.tolist()):
        accepted, proposed, at = int(row[0]), int(row[1]), 2 + width
        last = int(row[at]) if plan.is_tree else accepted  # the node after which the next token comes
        tokens = [int(token) for token in row[2 : 3 + accepted]]
        if proposed < 0 or (numbers is not None and not _finite(numbers[index, last], tokens[-1])):
            raise EngineError(
                "the models' logits are NaN or infinite, as happens when a graph overflows in float16; "
                "export the pair in bfloat16 or float32"
            )
        beside = int(row[at + 1]) if plan.branches else int(last > k)
        trace, entropies, at = None, (), at + plan.is_tree + (plan.branches > 0)
        if plan.entropies:
            entropies, at = tuple(row[at : at + proposed]), at + k
        if plan.traced:
            traced = Traced(row[at:], plan)
            at += traced.width
            trace = traced.round(accepted, last, tokens[-1], entropies)
        logprobs = [] if plan.logprobs is None else _logprobs(row[at:], tokens, width, plan.logprobs)
        results.append(RowResult(accepted, proposed, beside, tokens, logprobs, trace, entropies))
    return results


def _finite(logits: np.ndarray, token: int) -> bool:
    return token < len(logits) and isfinite(logits.item(token))


def _trace_parts(done: Round, plan: Plan) -> list[torch.Tensor]:
    target, proposal = done.verdict.target_probabilities, done.proposal
    assert target is not None
    tokens, tree = proposal.tokens, proposal.tree
    next_token = done.verdict.tokens.gather(1, done.verdict.next_index)
    next_p = pick(target, done.verdict.last).gather(1, next_token)
    if tree is None or proposal.counts is None:
        return [
            tokens,
            chosen(target, tokens),
            chosen(proposal.probabilities, tokens),
            next_p,
            proposal.proposed[:, None],
        ]
    p = chosen(at_nodes(target, tree.parents), tokens)
    shape = [proposal.counts, tree.parents, tree.ranks, tree.exists]
    return [tokens, p, _q_of_nodes(proposal, tree, plan.draft_length), next_p, *shape]


def _q_of_nodes(proposal: Proposal, tree: Tree, k: int) -> torch.Tensor:
    """Return the probability [A, N] of each token where it was drawn: siblings by the first line's q."""
    q, tokens, after = proposal.probabilities, proposal.tokens, proposal.after
    if after is None:
        found = chosen(q if q is None else at_nodes(q, tree.parents.clamp(max=k - 1)), tokens)
    else:
        found = chosen(at_nodes(after, tree.parents), tokens)
        found[:, :k] = chosen(q, tokens[:, :k])  # a row that copies was certain of them
    if tree.lines > 1:
        each = [chosen(law, tokens[:, i * k : (i + 1) * k]) for i, law in enumerate(proposal.laws)]
        lines = torch.cat(each, 1)
        own = tree.hung.any(1, keepdim=True) | tree.grown.any(1, keepdim=True)
        found[:, : lines.shape[1]] = torch.where(own, found[:, : lines.shape[1]], lines)
    return found


class Traced:
    """A round's proposals as a table tells them: token, p and q of each node, and their shape."""

    def __init__(self, row: Sequence[float], plan: Plan) -> None:
        nodes, self._k, lines = plan.draft_length + plan.beyond, plan.draft_length, len(plan.lines)
        self._tokens, self._p, self._q = (row[i * nodes : (i + 1) * nodes] for i in range(3))
        self._next_p, at = row[3 * nodes], 3 * nodes + 1
        self._counts = [int(count) for count in row[at : at + lines]]
        at += lines
        self.width = at + 3 * nodes if plan.is_tree else at
        self._parents, self._ranks, self._exist = (
            [int(number) for number in row[at + i * nodes : at + (i + 1) * nodes]] if plan.is_tree else []
            for i in range(3)
        )

    def round(self, accepted: int, last: int, next_token: int, entropies: tuple[float, ...]) -> TracedRound:
        siblings = self._siblings(last)
        line = next((i for i, count in enumerate(self._counts) if count), 0)
        if accepted and not any(one.stands for one in siblings):
            line = (last - 1) // self._k
        proposal, *others = (self._line(i) for i in (line, *range(line), *range(line + 1, len(self._counts))))
        own = slice(line * self._k, line * self._k + self._counts[line])
        p, q = tuple(self._p[own]), tuple(self._q[own])
        beside = tuple(filter(None, others))
        return TracedRound(proposal, accepted, next_token, p, q, self._next_p, entropies, siblings, beside)

    def _line(self, number: int) -> tuple[int, ...]:
        begin = number * self._k
        return tuple(map(int, self._tokens[begin : begin + self._counts[number]]))

    def _siblings(self, last: int) -> tuple[TracedSibling, ...]:
        """Read the nodes beside a row's only line, level by level, as they follow their parents."""
        if not self._exist or any(self._counts[1:]):
            return ()
        stand = Tree.path_to(last, self._parents)
        nodes = [node for node in range(self._k + 1, len(self._exist) + 1) if self._exist[node - 1]]
        depths = {node: len(Tree.path_to(node, self._parents)) for node in nodes}
        found: dict[int, TracedSibling] = {}
        after: dict[int, int] = {}  # the places in `found` of nodes that others follow
        for node in sorted(nodes, key=lambda node: (depths[node], self._ranks[node - 1])):
            i, parent = node - 1, self._parents[node - 1]
            token, p, q = int(self._tokens[i]), self._p[i], self._q[i]
            found[node] = TracedSibling(depths[node] - 1, token, p, q, node in stand, after.get(parent))
            after[node] = len(after)
        return tuple(found.values())


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
