"""Look-aheads, which the target reads after the root of a round, and by whose distributions the next round draws.

They follow the last committed token and one another, as a line of their own would whose tokens nobody proposes. So no
proposal sees them, they see none, and no node's logits change.
"""

import torch
from torch import Tensor

from .indexing import counting
from .tree import Nodes


class LookAheads:
    """Fixed memory for what the target reads: tokens of nodes, then so many look-aheads from id `first` on."""

    def __init__(self, tokens: Tensor, count: int, first: int, nodes: Nodes) -> None:
        self._tokens, self._nodes = tokens, nodes  # [A, N+1], and how they follow one another
        batch, width = tokens.shape
        numbers = counting(width + count, tokens.device)
        ahead = (numbers - (width - 1)).clamp(min=0)  # 0 of nodes, then 1, 2, …
        places = torch.where(ahead > 0, ahead, numbers)
        own = (ahead > 0)[:, None] & (ahead > 0) & (ahead <= ahead[:, None])  # what a look-ahead sees of its like
        line = (ahead == 0)[:, None] & (ahead == 0) & (numbers <= numbers[:, None])
        self.ids = torch.where(ahead > 0, first - 1 + ahead, 0).expand(batch, -1).contiguous()  # [A, N+1+T]
        self.depths = places.expand(batch, -1).contiguous()  # [A, N+1+T]
        self.ancestors = (own | line | (numbers == 0)).expand(batch, -1, -1).contiguous()  # [A, N+1+T, N+1+T]

    def fill(self) -> None:
        """Read the nodes as they are now."""
        width = self._tokens.shape[1]
        self.ids[:, :width].copy_(self._tokens)
        self._nodes.show(self.depths[:, :width], self.ancestors[:, :width, :width])
