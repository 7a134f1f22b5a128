"""Look-aheads, which the target reads behind the root of a round, and by whose distributions the next round draws.

They stand behind the last committed token alone, one behind another, as a line of their own would, whose tokens nobody
proposes. So no proposal sees them, they see none, and no node's logits change.
"""

import torch
from torch import Tensor

from .indexing import counting
from .tree import Tree


class LookAheads:
    """Fixed memory for what the target reads: the nodes of a round, then so many look-aheads from id `first` on."""

    def __init__(self, nodes: Tensor, count: int, first: int, tree: Tree | None) -> None:
        self._nodes, self._tree = nodes, tree  # [A, N+1] tokens, and how they branch; None: a line
        batch, width = nodes.shape
        numbers = counting(width + count, nodes.device)
        ahead = (numbers - (width - 1)).clamp(min=0)  # 0 of nodes, then 1, 2, …
        places = torch.where(ahead > 0, ahead, numbers)
        own = (ahead > 0)[:, None] & (ahead > 0) & (ahead <= ahead[:, None])  # what a look-ahead sees of its like
        line = (ahead == 0)[:, None] & (ahead == 0) & (numbers <= numbers[:, None])
        self.ids = torch.where(ahead > 0, first - 1 + ahead, 0).expand(batch, -1).contiguous()  # [A, N+1+T]
        self.depths = places.expand(batch, -1).contiguous()  # [A, N+1+T]
        self.ancestors = (own | line | (numbers == 0)).expand(batch, -1, -1).contiguous()  # [A, N+1+T, N+1+T]

    def fill(self) -> None:
        """Read the nodes as they are now."""
        width = self._nodes.shape[1]
        self.ids[:, :width].copy_(self._nodes)
        if self._tree is not None:
            self.depths[:, :width].copy_(self._tree.depths)
            self.ancestors[:, :width, :width].copy_(self._tree.ancestors)
