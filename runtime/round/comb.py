"""The shape of proposals that are a comb: a line, and siblings beside its tokens, which nothing follows.

Node 0 is the last committed token, nodes 1 … K are the line, nodes K+1 … K+M the siblings.
"""

import torch
from torch import Tensor

from .rows import counting


class Comb:
    """Fixed memory for the shapes of all rows; the line never changes, the siblings are hung anew in each round."""

    def __init__(self, batch: int, length: int, siblings: int, device: torch.device) -> None:
        nodes = length + siblings + 1
        self.nodes = counting(nodes, device)
        own = torch.eye(nodes, dtype=torch.bool, device=device)
        self.depths = torch.zeros(batch, nodes, dtype=torch.int64, device=device)
        self.ancestors = own.expand(batch, nodes, nodes).contiguous()  # [A, N+1, N+1], each token its own
        self.parents = torch.zeros(batch, nodes - 1, dtype=torch.int64, device=device)  # [A, N]
        self.exists = torch.zeros(batch, nodes - 1, dtype=torch.bool, device=device)  # [A, N]
        self.ranks = torch.zeros(batch, siblings, dtype=torch.int64, device=device)  # among the siblings of one place
        line = self.nodes[: length + 1]
        self.depths[:, : length + 1] = line
        self.ancestors[:, : length + 1, : length + 1] = line <= line[:, None]
        self.parents[:, :length] = line[:-1]
        self._line, self._length = line, length

    @property
    def places(self) -> Tensor:
        """Beside which proposal of the line each sibling is, [A, M]."""
        return self.parents[:, self._length :]

    def end_lines(self, proposed: Tensor) -> None:
        """Let each row's line have as many tokens [A] as it proposes."""
        torch.lt(self._line[:-1], proposed[:, None], out=self.exists[:, : self._length])

    def hang(self, places: Tensor, ranks: Tensor, exist: Tensor) -> None:
        """Let sibling s of a row be the `ranks[s]`-th beside proposal `places[s]`, if it exists."""
        length = self._length
        self.places.copy_(places)
        self.ranks.copy_(ranks)
        torch.add(places, 1, out=self.depths[:, length + 1 :])
        torch.le(self._line, places[:, :, None], out=self.ancestors[:, length + 1 :, : length + 1])
        self.exists[:, length:].copy_(exist)

    def children(self, most: int) -> Tensor:
        """Return the nodes [A, K, most + 1] that follow each place: the line's own, then its siblings; 0: none."""
        batch, length = len(self.parents), self._length
        found = torch.zeros(batch, length, most + 1, dtype=torch.int64, device=self.parents.device)
        index = self.places * (most + 1) + self.ranks
        found.flatten(1).scatter_add_(1, index, self.nodes[length + 1 :] * self.exists[:, length:])
        found[:, :, 0] = self._line[1:] * self.exists[:, :length]
        return found
