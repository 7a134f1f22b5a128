"""The tokens of a search: a tree after the prompt, of all that beams say and drafts propose."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Best(NamedTuple):
    """The tokens that may follow a node best, and their log-probabilities."""

    scores: NDArray[np.float32]
    tokens: NDArray[np.int64]


@dataclass(eq=False, slots=True)
class Node:
    """A token after those of its ancestors; the root is the prompt."""

    parent: "Node | None"
    token: int
    depth: int  # of the first token after the prompt 0, of the root -1
    said: Best | None = None  # by the target, once it has read the node
    guessed: Best | None = None  # by the draft
    children: "dict[int, Node]" = field(default_factory=dict)

    def child(self, token: int) -> "Node":
        """Return the node that says this token next, a new one if there is none."""
        if token not in self.children:
            self.children[token] = Node(self, token, self.depth + 1)
        return self.children[token]

    def path(self, since: int = 0) -> "list[Node]":
        """Return the nodes on the way from the root to this one, from a depth on; the root has none."""
        found, node = list[Node](), self
        while node.depth >= since and node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def below(self) -> "Iterator[Node]":
        """Iterate over this node and all that follows it, parents first."""
        waiting = [self]
        for node in waiting:
            yield node
            waiting += node.children.values()
