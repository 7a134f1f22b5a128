"""The shape of proposals that are no single line. What a row has behind its first line is its own affair.

a comb:        a line, and siblings beside its tokens, which nothing follows
several lines: they begin at the same token and know nothing of each other; tokens that they share are there twice

Node 0 is the last committed token, nodes 1 … K are the first line, K+1 … the siblings of a row, or its further lines
one after another.
"""

import torch
from torch import Tensor

from .rows import counting


class Tree:
    """Fixed memory for the shapes of all rows; lines never change, siblings are hung anew in each round."""

    def __init__(self, batch: int, length: int, lines: int, siblings: int, device: torch.device) -> None:
        ends = lines * length + 1
        nodes = max(ends, length + siblings + 1)
        self.length, self.lines = length, lines
        self.nodes = counting(nodes, device)
        line, place = (self.nodes[:ends] - 1).div(length, rounding_mode="floor"), (self.nodes[:ends] - 1) % length
        own = torch.eye(nodes, dtype=torch.bool, device=device)
        own[:ends, :ends] |= (line == line[:, None]) & (place <= place[:, None])
        own[:, 0] |= self.nodes < ends
        own[0, 1:] = False
        depths = torch.zeros(nodes, dtype=torch.int64, device=device)
        depths[1:ends] = place[1:] + 1
        self._depths, self._ancestors = depths, own
        self._parents = torch.zeros(nodes - 1, dtype=torch.int64, device=device)
        self._parents[: ends - 1] = self.nodes[: ends - 1] * (place[1:] > 0)
        self.depths = depths.expand(batch, nodes).contiguous()  # [A, N+1]
        self.ancestors = own.expand(batch, nodes, nodes).contiguous()  # [A, N+1, N+1], each token its own
        self.parents = self._parents.expand(batch, nodes - 1).contiguous()  # [A, N]
        self.exists = torch.zeros(batch, nodes - 1, dtype=torch.bool, device=device)  # [A, N]
        self.places = torch.zeros(batch, siblings, dtype=torch.int64, device=device)  # of the line, beside them
        self.ranks = torch.zeros_like(self.places)  # among the siblings of one place
        self.hung = torch.zeros(batch, siblings, dtype=torch.bool, device=device)  # whether they exist
        self._line = self.nodes[: length + 1]

    def end_lines(self, proposed: Tensor) -> None:
        """Let each row's lines have as many tokens [A, D] as they propose, beside the siblings that hang there."""
        length, siblings = self.length, self.hung.shape[1]
        ends = self.lines * length
        torch.lt(self._line[:-1], proposed[:, :, None], out=self.exists[:, :ends].view(-1, self.lines, length))
        if siblings:
            self.exists[:, ends:] = False
            self.exists[:, length : length + siblings].logical_or_(self.hung)

    def hang(self, places: Tensor, ranks: Tensor, exist: Tensor, rows: Tensor) -> None:
        """Let sibling s of one of the `rows` [A] be the `ranks[s]`-th beside proposal `places[s]`, if it exists."""
        length, count = self.length, places.shape[1]
        nodes = slice(length + 1, length + 1 + count)
        self.places.copy_(places)
        self.ranks.copy_(ranks)
        torch.logical_and(exist, rows[:, None], out=self.hung)
        self.parents[:, length : length + count] = places
        torch.add(places, 1, out=self.depths[:, nodes])
        torch.le(self._line, places[:, :, None], out=self.ancestors[:, nodes, : length + 1])
        if self.lines > 1:
            self._keep_lines(~rows[:, None], nodes)

    def _keep_lines(self, rows: Tensor, nodes: slice) -> None:
        """Let the `rows` [A, 1] that have no siblings have further lines there, and the others nothing else."""
        parents, beyond = slice(nodes.start - 1, nodes.stop - 1), slice(nodes.start, None)
        self.parents[:, parents] = torch.where(rows, self._parents[parents], self.parents[:, parents])
        self.depths[:, nodes] = torch.where(rows, self._depths[nodes], self.depths[:, nodes])
        whole, rows = self.ancestors[:, nodes], rows[:, :, None]
        whole.copy_(torch.where(rows, self._ancestors[nodes], whole))
        own = self.nodes[nodes, None] == self.nodes[beyond]
        whole[:, :, beyond] = torch.where(rows, self._ancestors[nodes, beyond], own)

    def children(self, most: int) -> Tensor:
        """Return the nodes [A, K, most + 1] that follow each place: the line's own, then its siblings; 0: none."""
        batch, length = len(self.parents), self.length
        found = torch.zeros(batch, length, most + 1, dtype=torch.int64, device=self.parents.device)
        index = self.places * (most + 1) + self.ranks
        nodes = self.nodes[length + 1 : length + 1 + self.hung.shape[1]]
        found.flatten(1).scatter_add_(1, index, nodes * self.hung)
        found[:, :, 0] = self._line[1:] * self.exists[:, :length]
        return found

    def paths(self, row: int) -> list[list[int]]:
        """Return the nodes from the root to each that ends a path of the row; the root itself is left out."""
        parents = self.parents[row].tolist()
        nodes = [node for node, exists in enumerate(self.exists[row].tolist(), 1) if exists]
        followed = {parents[node - 1] for node in nodes}
        found = []
        for node in nodes:
            if node not in followed:
                path = [node]
                while parent := parents[path[-1] - 1]:
                    path.append(parent)
                found.append(path[::-1])
        return found or [[]]
