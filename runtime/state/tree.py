"""The shape of proposals that are more than one line; each row may have something else behind its first line.

a comb:        a line, and siblings beside its tokens, which nothing follows
a tree:        a line, and branches beside it, which others may follow
several lines: they begin at the same token and know nothing of each other; tokens that they share are there twice

Node 0 is the last committed token, nodes 1 … K are the first line, K+1 … the siblings of a row, or its branches level
by level, or its further lines one after another.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .indexing import at_nodes, counting
from .noise import MOST_CHILDREN, of_sibling


class Tree:
    """Fixed memory for the shapes of all rows; lines never change, all else is placed anew in each round."""

    def __init__(
        self, batch: int, length: int, lines: int, siblings: int, device: torch.device, branches: int = 0
    ) -> None:
        ends = lines * length + 1
        nodes = max(ends, length + siblings + 1, length + branches + 1)
        self.length, self.lines = length, lines
        self.nodes = counting(nodes, device)
        line, place = (self.nodes[:ends] - 1).div(length, rounding_mode="floor"), (self.nodes[:ends] - 1) % length
        own = torch.eye(nodes, dtype=torch.bool, device=device)
        own[:ends, :ends] |= (line == line[:, None]) & (place <= place[:, None])
        own[:, 0] |= self.nodes < ends
        own[0, 1:] = False

        def whole(*size: int) -> Tensor:
            return torch.zeros(*size, dtype=torch.int64, device=device)

        depths, parents, ranks = whole(nodes), whole(nodes - 1), whole(nodes - 1)
        depths[1:ends] = place[1:] + 1
        parents[: ends - 1] = self.nodes[: ends - 1] * (place[1:] > 0)
        ranks[: ends - 1] = line[1:] * (place[1:] == 0)
        self._lines = depths, parents, ranks, own
        self._own = torch.eye(nodes, dtype=torch.bool, device=device)
        self.depths = depths.expand(batch, nodes).contiguous()  # [A, N+1]
        self.parents = parents.expand(batch, nodes - 1).contiguous()  # [A, N]
        self.ranks = ranks.expand(batch, nodes - 1).contiguous()  # [A, N], among the children of one node
        self.ancestors = own.expand(batch, nodes, nodes).contiguous()  # [A, N+1, N+1], each token its own
        self.exists = torch.zeros(batch, nodes - 1, dtype=torch.bool, device=device)  # [A, N]
        self.uniforms = whole(batch, nodes - 1 - length)  # of those beyond the line's, the one that each node has
        self.hung = torch.zeros(batch, siblings, dtype=torch.bool, device=device)  # which siblings exist
        self.grown = torch.zeros(batch, branches, dtype=torch.bool, device=device)  # which branches do
        self._line = self.nodes[: length + 1]
        self._mixed = (lines > 1) + (siblings > 0) + (branches > 0) > 1  # rows may differ in what they have

    def begin(self) -> None:
        """Forget what rows had in the last round where others would not write over it."""
        self.grown.zero_()
        if self._mixed:
            for own, lines in zip((self.depths, self.parents, self.ranks, self.ancestors), self._lines, strict=True):
                own.copy_(lines.expand_as(own))

    def end_lines(self, proposed: Tensor) -> None:
        """End each row's lines after as many tokens [A, D] as they propose; siblings and branches stay as they are."""
        length, siblings, branches = self.length, self.hung.shape[1], self.grown.shape[1]
        ends = self.lines * length
        torch.lt(self._line[:-1], proposed[:, :, None], out=self.exists[:, :ends].view(-1, self.lines, length))
        self.exists[:, ends:] = False
        self.exists[:, length : length + siblings].logical_or_(self.hung)
        self.exists[:, length : length + branches].logical_or_(self.grown)

    def hang(self, places: Tensor, ranks: Tensor, exist: Tensor, rows: Tensor) -> None:
        """Let sibling s of one of the `rows` [A] be the `ranks[s]`-th beside proposal `places[s]`, if it exists."""
        torch.logical_and(exist, rows[:, None], out=self.hung)
        mine = rows[:, None].expand_as(exist) if self._mixed else None
        self._put(mine, places, ranks, places + 1, of_sibling(ranks, places))

    def grow(self, mine: Tensor, parents: Tensor, ranks: Tensor, exist: Tensor) -> None:
        """Let those branches of each row that are `mine` [A, B] follow these nodes, if they exist."""
        torch.where(mine, exist, self.grown, out=self.grown)
        depths = self.depths.gather(1, parents) + 1
        self._put(mine, parents, ranks, depths, self.nodes[: mine.shape[1]])

    def _put(self, mine: Tensor | None, parents: Tensor, ranks: Tensor, depths: Tensor, uniforms: Tensor) -> None:
        """Put nodes behind the first lines of all rows, or only those that are `mine`."""
        begin, count = self.length, parents.shape[1]
        nodes, behind = slice(begin + 1, begin + 1 + count), slice(begin, begin + count)
        ancestors = at_nodes(self.ancestors, parents).logical_or_(self._own[nodes])
        for memory, found in (
            (self.parents[:, behind], parents),
            (self.ranks[:, behind], ranks),
            (self.depths[:, nodes], depths),
            (self.uniforms[:, :count], uniforms),
            (self.ancestors[:, nodes], ancestors),
        ):
            if mine is None:
                memory.copy_(found)
            else:
                memory.copy_(torch.where(mine if found.dim() < 3 else mine[:, :, None], found, memory))

    def children(self) -> Tensor:
        """Return the nodes [A, N+1, R] that follow each, by rank; 0: none."""
        found = torch.zeros(
            len(self.parents), len(self.nodes) * MOST_CHILDREN, dtype=torch.int64, device=self.nodes.device
        )
        found.scatter_add_(1, self.parents * MOST_CHILDREN + self.ranks, self.nodes[1:] * self.exists)
        return found.view(len(found), -1, MOST_CHILDREN)

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
