"""The nodes that a round proposes where they are more than one line; rows may differ in what comes after the first.

Node 0 is the last committed token and nodes 1 … K are the first line. After it come a row's further lines, each from a
drafter of its own, or the branches beside its line, in the order in which they are placed. What two drafters both
propose is there twice.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ...engines import MAX_DRAFT_LENGTH
from ..memory.cache import KVCache
from ..memory.row_cache import RowCache
from ..memory.tokens import Ancestry
from .indexing import at_nodes, counting, pick
from .line import Line, Links, Walk
from .place import on_host
from .verdict import Verdict

CERTAIN = -1  # in place of the distribution, for a token that was not drawn from one


class Tree:
    """Fixed memory for the nodes of all rows; lines never change, branches are placed anew in each round."""

    def __init__(
        self, batch: int, length: int, have_distributions: Sequence[bool], branches: int, device: torch.device
    ) -> None:
        self.length, self.lines, self.branches = length, len(have_distributions), branches
        self.all_have_distributions = all(have_distributions)
        ends = self.lines * length
        nodes = 1 + max(ends, length + branches)
        self.numbers = counting(nodes, device)
        line, place = self.numbers[:ends].div(length, rounding_mode="floor"), self.numbers[:ends] % length
        own = torch.eye(nodes, dtype=torch.bool, device=device)
        own[1 : ends + 1, 1 : ends + 1] |= (line == line[:, None]) & (place <= place[:, None])
        own[1 : ends + 1, 0] = True

        def after_lines(values: Tensor, others: Tensor) -> Tensor:
            return torch.cat([values, others[ends:]])

        zeros = torch.zeros_like(self.numbers[1:])
        number = dict(zip([i for i, has in enumerate(have_distributions) if has], range(self.lines), strict=False))
        distributions = torch.tensor([number.get(i, CERTAIN) for i in range(self.lines)], device=device)[line]
        self._lines = (
            torch.cat([self.numbers[:1], after_lines(place + 1, zeros)]),
            after_lines(self.numbers[:ends] * (place > 0), zeros),
            after_lines(line, zeros),
            after_lines(torch.where(distributions == CERTAIN, CERTAIN, distributions * length + place), zeros),
            after_lines(line.sub(1).mul(MAX_DRAFT_LENGTH).add(place), self.numbers[:-1] - length).clamp_(min=0),
            own,
        )
        memory = [each.expand(batch, *each.shape).contiguous() for each in self._lines]
        # What the graphs read: depths [A, N+1], and ancestors [A, N+1, N+1], where each token is its own.
        # Of each proposal [A, N]: the node that it follows; its place in the order in which what follows the same
        # tokens is tested; which of the distributions of a round it was drawn from; which of the uniforms beyond a line
        # it has.
        self.depths, self.parents, self.turns, self.distributions, self.uniforms, self.ancestors = memory
        self.exists = torch.zeros(batch, nodes - 1, dtype=torch.bool, device=device)  # [A, N]
        self._own = torch.eye(nodes, dtype=torch.bool, device=device)
        self._mixed = self.lines > 1 and branches > 0  # rows may differ in what comes after their first line

    @property
    def ancestry(self) -> Ancestry:
        return self

    def begin(self) -> None:
        """Forget what rows had in the last round."""
        self.exists.zero_()
        if self._mixed:
            memory = self.depths, self.parents, self.turns, self.distributions, self.uniforms, self.ancestors
            for own, lines in zip(memory, self._lines, strict=True):
                own.copy_(lines.expand_as(own))

    def end_line(self, number: int, proposed: Tensor) -> None:
        """End a line after as many tokens [A] as each row proposes."""
        line = self.exists[:, number * self.length : (number + 1) * self.length]
        line.logical_or_(self.numbers[: self.length] < proposed[:, None])

    def place(self, mine: Tensor, parents: Tensor, turns: Tensor, distributions: Tensor, exist: Tensor) -> None:
        """Let those branches of each row that are `mine` [A, B] follow these nodes, if they exist."""
        proposals = slice(self.length, self.length + self.branches)
        nodes = slice(self.length + 1, self.length + 1 + self.branches)
        depths = self.depths.gather(1, parents) + 1
        ancestors = at_nodes(self.ancestors, parents).logical_or_(self._own[nodes])
        for memory, found in (
            (self.parents[:, proposals], parents),
            (self.turns[:, proposals], turns),
            (self.distributions[:, proposals], distributions),
            (self.exists[:, proposals], exist),
            (self.depths[:, nodes], depths),
        ):
            torch.where(mine, found, memory, out=memory)
        if self._mixed:
            uniforms = self.uniforms[:, proposals]
            torch.where(mine, self.numbers[: self.branches], uniforms, out=uniforms)
        torch.where(mine[:, :, None], ancestors, self.ancestors[:, nodes], out=self.ancestors[:, nodes])

    def show(self, depths: Tensor, ancestors: Tensor) -> None:
        depths.copy_(self.depths)
        ancestors.copy_(self.ancestors)

    def links(self, tokens: Tensor, proposed: Tensor) -> Links:
        return Links(self.parents, self.turns, self.exists, self.distributions)

    # What comes before a node.

    def at_parents(self, values: Tensor) -> Tensor:
        return at_nodes(values, self.parents)

    def at_depths(self, values: Tensor) -> Tensor:
        return at_nodes(values, self.depths)

    def places(self, tokens: Tensor) -> Tensor:
        return self.depths

    def highest(self, first: Tensor, numbers: Tensor) -> Tensor:
        return torch.maximum(first, numbers[:, None].masked_fill(~self.ancestors[:, :, 1:], -1).amax(-1))

    def counts(self, tokens: Tensor, before: Tensor, width: int, positions: Tensor | None) -> Tensor:
        said = torch.zeros(*tokens.shape, before.shape[1], device=before.device).scatter_(2, tokens[:, :, None], 1.0)
        ancestors = self.ancestors[:, :, 1:]
        if positions is not None:
            ancestors = ancestors.gather(1, positions[:, :, None].expand(-1, -1, tokens.shape[1]))
        return before[:, None] + ancestors.float() @ said

    def walks(self, row: int, tokens: Sequence[int], width: int, positions: Sequence[int] | None) -> Iterable[Walk]:
        if positions is None:
            ends = self.paths(row)
            return [Walk([0, *path], [tokens[node - 1] for node in path], len(path) + 1) for path in ends]
        parents = self.parents[row].tolist()
        ways = [self.path_to(node, parents) for node in positions]
        return [Walk([place], [tokens[node - 1] for node in way], 1) for place, way in enumerate(ways)]

    # What is accepted.

    def agree(self, tokens: Tensor, verdict: Verdict) -> Tensor:
        return verdict.picked.gather(1, self.parents) == tokens

    def accept_deepest(self, passed: Tensor, proposed: Tensor | None, verdict: Verdict) -> None:
        rejected = (self.ancestors[:, :, 1:] & ~(passed & self.exists)[:, None]).any(-1)  # [A, N+1]
        depth, last = self.depths.masked_fill(rejected, 0).max(1)
        own = pick(self.ancestors, last)
        path = torch.zeros_like(verdict.path)
        verdict.put(None, depth, path.scatter_(1, self.depths * own, self.numbers * own))
        torch.gather(verdict.picked, 1, verdict.path, out=verdict.tokens)

    def accept_first_line(self, coupled: Tensor | None, verdict: Verdict) -> None:
        path = self.numbers[: self.length + 1] * (self.numbers[: self.length + 1] <= verdict.accepted[:, None])
        verdict.put(None if coupled is None else ~coupled, verdict.accepted, path)

    def count_proposed(self, tokens: Tensor, proposed: Tensor, verdict: Verdict) -> None:
        torch.amax(self.depths[:, 1:] * self._after_accepted(tokens, verdict), 1, out=verdict.proposed)

    def along(self, values: Tensor, verdict: Verdict) -> Tensor:
        return at_nodes(values, verdict.path)

    def said(self, tokens: Tensor, verdict: Verdict) -> Tensor:
        return tokens.gather(1, (verdict.path[:, 1:] - 1).clamp_(min=0))

    def settle(self, verdict: Verdict, caches: Sequence[KVCache], start: Tensor) -> None:
        if on_host(start.device) and torch.equal(verdict.last, verdict.accepted):
            return  # all of it is on first lines
        for cache in caches:
            assert isinstance(cache, RowCache), "an engine that takes trees reads rows"
            cache.straighten(start, verdict.path)

    def outcome(self, verdict: Verdict) -> Sequence[Tensor]:
        return verdict.last[:, None], (verdict.path > self.length).sum(1, keepdim=True)

    def at_first_rejection(self, tokens: Tensor, verdict: Verdict) -> Tensor:
        """Mark the nodes [A, N+1] that spell what is accepted of the first line, by these `tokens` [A, N]."""
        here = self.depths == verdict.accepted[:, None]
        if self.lines == 1:  # of branches beside one line none has its tokens
            return here & (self.numbers == verdict.last[:, None])
        return here & ~self._astray(tokens, tokens[:, : self.length], verdict)

    def _after_accepted(self, tokens: Tensor, verdict: Verdict) -> Tensor:
        """Mark the proposals [A, N] that exist and agree with all that is accepted."""
        if self.lines == 1:
            last = verdict.last[:, None, None].expand(-1, len(self.numbers), 1)
            return self.exists & self.ancestors.gather(2, last)[:, 1:, 0]
        return self.exists & ~self._astray(tokens, verdict.leading, verdict)[:, 1:]

    def _astray(self, tokens: Tensor, accepted: Tensor, verdict: Verdict) -> Tensor:
        """Mark the nodes [A, N+1] whose path differs from the first tokens that are `accepted` [A, K]."""
        depths = self.depths[:, 1:]
        said = accepted.gather(1, (depths - 1).clamp_(min=0))
        differs = (tokens != said) & (depths <= verdict.accepted[:, None])
        return (self.ancestors[:, :, 1:] & differs[:, None]).any(-1)

    def following(self, some: Tensor, turns: int) -> Tensor:
        """Return what follows some nodes [A, N+1] that have the same path, by turn [A, T]; 0: nothing."""
        theirs = some.gather(1, self.parents) & self.exists
        found = torch.zeros(len(some), turns, dtype=torch.int64, device=some.device)
        return found.scatter_add_(1, self.turns, self.numbers[1:] * theirs)

    def paths(self, row: int) -> list[list[int]]:
        """Return the nodes from the root to each that ends a path of the row; the root itself is left out."""
        parents = self.parents[row].tolist()
        nodes = [node for node, exists in enumerate(self.exists[row].tolist(), 1) if exists]
        followed = {parents[node - 1] for node in nodes}
        return [self.path_to(node, parents) for node in nodes if node not in followed] or [[]]

    @staticmethod
    def path_to(node: int, parents: Sequence[int]) -> list[int]:
        """Return the nodes on the way from the root to this one, without the root."""
        path = []
        while node:
            path.append(node)
            node = parents[node - 1]
        return path[::-1]


Nodes = Line | Tree  # how the proposals of a round follow one another
