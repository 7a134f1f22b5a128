"""The entries that one model has of a search: after the prompt they branch, and a call says which of them it sees.

What all beams say lies in order. After it lies the tail: tokens that some beams say, and proposals.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..memory.model import Model
from ..memory.row_cache import RowCache
from ..memory.tokens import Tokens
from .node import Node

STEP = 32  # calls get a multiple of so many entries before their own, which some engines prepare for


@dataclass
class BranchedCall:
    """The places of a call: the entries it branches from, and its own tokens."""

    depths: Tensor  # [1, W]
    ancestors: Tensor  # [1, S, W]


class Tail:
    """One model's row, from the end of the prompt on."""

    def __init__(self, model: Model, prompt: int) -> None:
        self.model, self._prompt = model, prompt
        self.settled = 0  # tokens after the prompt that all beams say
        self._nodes: list[Node] = []  # of the entries after them, in their order
        self._places: dict[Node, int] = {}
        self._seen = np.zeros((0, 0), bool)  # which of them each sees

    def lacks(self, node: Node) -> bool:
        """Whether it has no entry of a node that some beam leads to."""
        return node.depth >= self.settled and node not in self._places

    def lacking(self, nodes: Iterable[Node]) -> list[Node]:
        """Return what it lacks of the nodes and of their paths, parents first; of what it has it has all before."""
        found = dict[Node, None]()
        for each in nodes:
            node: Node | None = each
            while node is not None and node not in found and self.lacks(node):
                found[node] = None
                node = node.parent
        return sorted(found, key=lambda one: one.depth)

    def read(self, row: int, nodes: Sequence[Node]) -> Tensor:
        """Write the entries of nodes, parents before their children; return the logits [S, V] after each."""
        before, width = len(self._nodes), len(nodes)
        start = self._prompt + self.settled + before
        self.model.cache.make_room(row, [start], [width])
        shown = min(-before % STEP, self._prompt + self.settled)  # of what all see, so that widths repeat
        self._nodes += nodes
        self._places |= {node: place for place, node in enumerate(nodes, before)}
        seen = np.eye(before + width, dtype=bool)
        seen[:before, :before] = self._seen
        for place, node in enumerate(nodes, before):
            if node.parent in self._places:
                seen[place] |= seen[self._places[node.parent]]
        self._seen = seen
        depths = np.array([*range(-shown, 0), *(node.depth - self.settled for node in self._nodes)]) - before
        ancestors = np.concatenate([np.ones((width, shown), bool), seen[before:]], 1)
        device = self.model.engine.device
        given = [torch.from_numpy(each)[None].to(device) for each in (depths, ancestors)]
        ids, logits = torch.tensor([[node.token for node in nodes]], device=device), self.model.logits(1, width)
        first, entries_read = torch.tensor([start], device=device), self.model.bucket(start + width)
        tokens = Tokens(ids, first, row, entries_read, ancestry=BranchedCall(*given))
        self.model.step(tokens, logits).run()
        self.model.cache.wrote(row, start, start + width)
        return logits[0, :, : self.model.vocab_size]

    def keep(self, row: int, trunk: Sequence[Node], needed: Collection[Node]) -> None:
        """Drop the entries of all nodes that are not `needed`; those of the `trunk`, which all beams say, settle."""
        grown = [node for node in trunk if node.depth >= self.settled]
        settles = next((place for place, node in enumerate(grown) if node not in self._places), len(grown))
        settled = grown[:settles]
        rest = [node for node in self._nodes if node in needed and node not in settled]
        order = [self._places[node] for node in (*settled, *rest)]
        begin = self._prompt + self.settled
        if order != list(range(len(order))):
            cache = self.model.cache
            assert isinstance(cache, RowCache), "an engine that takes tails reads rows"
            cache.reorder(row, begin, order)
        self.model.cache.wrote(row, begin, begin + len(order))
        self.settled += settles
        self._nodes, self._places = rest, {node: place for place, node in enumerate(rest)}
        kept = order[settles:]
        self._seen = self._seen[np.ix_(kept, kept)]

    def forget(self, row: int) -> None:
        """Leave the prompt alone in the cache, as others may begin with it."""
        self.model.cache.wrote(row, self._prompt, self._prompt)
