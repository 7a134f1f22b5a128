"""A line: proposals of which each follows the one before. Whatever a round asks of a `Tree`, a line answers, too."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..memory.cache import KVCache
from .indexing import counting
from .verdict import Verdict


class Links(NamedTuple):
    """Of each proposal [A, N]: the node that it follows, its turn, whether it exists, which distribution drew it."""

    parents: Tensor
    turns: Tensor
    exists: Tensor
    distributions: Tensor


class Walk(NamedTuple):
    """Positions of a row that follow one another, the last of them after all that is `said`."""

    positions: slice | list[int]
    said: Sequence[int]
    width: int


class Line:
    """Node 0 is the last committed token, and the proposals follow it: of these are `tokens` [A, N].

    `values` [A, N+1, …] have an entry for each node. A line keeps nothing: how many proposals are accepted says which.
    """

    ancestry = None  # graphs read tokens as a line if nothing else is said
    all_have_distributions = True  # none is certain where others are not

    def begin(self) -> None:
        """Forget what rows had in the last round."""

    def end_line(self, number: int, proposed: Tensor) -> None:
        """End a line after as many tokens [A] as each row proposes."""

    def show(self, depths: Tensor, ancestors: Tensor) -> None:
        """Write what graphs read [A, N+1, …] where that may differ from a line's."""

    def links(self, tokens: Tensor, proposed: Tensor) -> Links:
        """Return how nodes follow one another; each row proposes so many [A] in its first line."""
        places = counting(tokens.shape[1], tokens.device).expand_as(tokens)
        return Links(places, torch.zeros_like(tokens), places < proposed[:, None], places)

    # What comes before a node.

    def at_parents(self, values: Tensor) -> Tensor:
        """Return the values [A, N, …] of the nodes that proposals follow."""
        return values[:, :-1]

    def at_depths(self, values: Tensor) -> Tensor:
        """Return of values of all depths [A, K+1, …] those of each node's."""
        return values

    def places(self, tokens: Tensor) -> Tensor:
        """Return how many tokens of the round lead to each node, [A, N+1] or [1, N+1]."""
        return counting(tokens.shape[1] + 1, tokens.device)[None]

    def highest(self, first: Tensor, numbers: Tensor) -> Tensor:
        """Return the highest [A, N+1] of the `first` [A, 1] and proposals' numbers >= -1 [A, N] up to each node."""
        return torch.cat([first, numbers], 1).cummax(1).values

    def counts(self, tokens: Tensor, before: Tensor, width: int, positions: Tensor | None) -> Tensor:
        """Return how often each token comes before positions [A, W, V]; those before the round are counted [A, V]."""
        first = tokens.shape[1] - (width - 1)  # so many come before the first position
        if first:
            before = before.scatter_add(1, tokens[:, :first], torch.ones_like(tokens[:, :first], dtype=before.dtype))
        if width == 1:
            return before[:, None]
        counts = torch.zeros(len(before), width, before.shape[1], device=before.device)
        counts[:, 1:].scatter_(2, tokens[:, first:, None], 1.0)
        return before[:, None] + counts.cumsum(1)

    def walks(self, row: int, tokens: Sequence[int], width: int, positions: Sequence[int] | None) -> Iterable[Walk]:
        """Return walks along the tokens of a row that together pass all positions."""
        return [Walk(slice(None), tokens, width)]

    # What is accepted.

    def agree(self, tokens: Tensor, verdict: Verdict) -> Tensor:
        """Mark the proposals [A, N] that the target has picked, too."""
        return torch.eq(verdict.leading, tokens, out=verdict.passed)

    def accept_deepest(self, passed: Tensor, proposed: Tensor | None, verdict: Verdict) -> None:
        """Accept the longest path of proposals that have passed [A, N], and say what the target has picked along it.

        Each row has K proposals in its first line, or as many as `proposed` [A] says.
        """
        verdict.accept_passed(proposed, verdict.accepted)

    def accept_first_line(self, coupled: Tensor | None, verdict: Verdict) -> None:
        """Let the path follow the first line as far as that is accepted, but not in rows that are coupled [A]."""

    def count_proposed(self, tokens: Tensor, proposed: Tensor, verdict: Verdict) -> None:
        """Write how many proposals of each row could have been accepted."""
        verdict.proposed.copy_(proposed)

    def along(self, values: Tensor, verdict: Verdict) -> Tensor:
        """Return the values [A, K+1, …] along the accepted path, garbage after its end."""
        return values

    def said(self, tokens: Tensor, verdict: Verdict) -> Tensor:
        """Return the proposals [A, K] of the accepted path, garbage after its end."""
        return tokens

    def settle(self, verdict: Verdict, caches: Sequence[KVCache], start: Tensor) -> None:
        """Move the caches' entries of the accepted path, so that each follows the one before."""

    def outcome(self, verdict: Verdict) -> Sequence[Tensor]:
        """Return what the host is given beside the table: the last node of the path, how many are on no first line."""
        return ()


IN_LINE = Line()  # one is enough
