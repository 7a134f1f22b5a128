"""The proposals of a round, the noise that draws and judges them, and the tokens before each of its positions."""

from typing import NamedTuple

import torch
from torch import Tensor

from .indexing import pick
from .noise import of_line
from .tree import CERTAIN, Tree


class ProposedTokens(NamedTuple):
    """The proposals of a round that come before its positions."""

    tokens: Tensor  # [A, N]
    tree: Tree | None = None  # None: a line, whose last position comes after all, each before it after one fewer
    nodes: Tensor | None = None  # [A, W] of a tree that the positions come after; None: all, one after another


class Noise(NamedTuple):
    """All randomness of one round; None where no row needs it."""

    gumbel: Tensor | None  # [A, K+1, V], zero in greedy rows
    draw: Tensor | None  # [A, 17] uniforms that draw tokens: column i draws proposal i, the last the next token
    test: Tensor | None  # [A, 17] uniforms that test proposals
    beyond: Tensor | None = None  # [A, 48, 2] uniforms that draw and test what lies beyond the first line

    def to_draw(self, line: int, length: int) -> Tensor | None:
        """Return the uniforms [A, K] that draw the proposals of a line."""
        if self.draw is None or not line:
            return None if self.draw is None else self.draw[:, :length]
        assert self.beyond is not None
        return self.beyond[:, of_line(line, length), 0]


class Proposal(NamedTuple):
    """The tokens that drafters propose, and the distribution that each was truly sampled from."""

    tokens: Tensor  # [A, K], or [A, N] of a tree
    proposed: Tensor  # [A] how many of the first K each row proposes
    probabilities: Tensor | None  # [A, K, V]; None: every proposal was certain
    entropies: Tensor | None = None  # [A, K] the draft's entropy at each, if asked for
    tree: Tree | None = None  # None: a line
    distributions: Tensor | None = None  # [A, Q, V] what the nodes of a tree were drawn from; None: all were certain

    def drawn_from(self, distribution: Tensor, token: Tensor, vocab_size: int) -> Tensor:
        """Return the q [A, V] that a token [A, 1] of the tree was drawn from, by the number of its distribution [A]."""
        if self.distributions is None:
            return torch.zeros(len(token), vocab_size, device=token.device).scatter_(1, token, 1.0)
        if self.tree is not None and self.tree.all_have_distributions:
            return pick(self.distributions, distribution)
        q = pick(self.distributions, distribution.clamp(min=0))
        return torch.where((distribution == CERTAIN)[:, None], torch.zeros_like(q).scatter_(1, token, 1.0), q)

    @property
    def before_target(self) -> ProposedTokens:
        """The proposals that come before the target's positions."""
        return ProposedTokens(self.tokens, self.tree)
