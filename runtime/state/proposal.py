"""The proposals of a round, the noise that draws and judges them, and the tokens before each of its positions."""

from typing import NamedTuple

from torch import Tensor

from .indexing import pick
from .noise import of_rank
from .tree import Tree


class Ahead(NamedTuple):
    """The proposals of a round that come before its positions."""

    tokens: Tensor  # [A, N]
    tree: Tree | None = None  # None: a line, whose last position comes after all, each before it after one fewer
    nodes: Tensor | None = None  # [A, W] of a tree that the positions come after; None: all, one after another


class Noise(NamedTuple):
    """All randomness of one round; None where no row needs it."""

    gumbel: Tensor | None  # [A, K+1, V], zero in greedy rows
    draw: Tensor | None  # [A, 17] uniforms that draw tokens: column i draws proposal i, the last the next token
    test: Tensor | None  # [A, 17] uniforms that test proposals
    beyond: Tensor | None = None  # [A, 48, 2] uniforms that draw and test siblings and further lines

    def to_draw(self, line: int, length: int) -> Tensor | None:
        """Return the uniforms [A, K] that draw the proposals of a line."""
        return self._of_line(line, length, self.draw, 0)

    def to_test(self, line: int, length: int) -> Tensor | None:
        return self._of_line(line, length, self.test, 1)

    def _of_line(self, line: int, length: int, first: Tensor | None, purpose: int) -> Tensor | None:
        if first is None or not line:
            return first if first is None else first[:, :length]
        assert self.beyond is not None
        return self.beyond[:, of_rank(line, length), purpose]


class Proposal(NamedTuple):
    """The tokens that drafters propose, and the distribution that each was truly sampled from."""

    tokens: Tensor  # [A, K], or [A, N] of a tree
    proposed: Tensor  # [A] how many of the first K each row proposes
    probabilities: Tensor | None  # [A, K, V]; None: every proposal was certain
    entropies: Tensor | None = None  # [A, K] the draft's entropy at each, if asked for
    tree: Tree | None = None  # None: a line
    counts: Tensor | None = None  # [A, D] how many each of several lines proposes
    laws: tuple[Tensor | None, ...] = ()  # for each of several lines what `probabilities` is for the first
    after: Tensor | None = None  # [A, N+1, V] what the children of each node were sampled from, if trees have grown

    def children_of(self, node: Tensor) -> Tensor:
        """Return the q [A, V] that the children of a node [A] were sampled from; without trees, the first line's."""
        if self.after is not None:
            return pick(self.after, node)
        assert self.probabilities is not None
        return pick(self.probabilities, node.clamp(max=self.probabilities.shape[1] - 1))

    @property
    def ahead(self) -> Ahead:
        """The proposals that come before the target's positions."""
        return Ahead(self.tokens, self.tree)
