"""The proposals of a round, the noise that draws and judges them, and the tokens before each of its positions."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from .indexing import pick
from .line import IN_LINE, Walk
from .noise import of_line
from .plan import Plan
from .rows import Rows
from .tree import CERTAIN, Nodes
from .verdict import Verdict


class ProposedTokens(NamedTuple):
    """The proposals of a round that come before its positions."""

    tokens: Tensor  # [A, N]
    nodes: Nodes = IN_LINE
    positions: Tensor | None = None  # [A, W], the nodes that are asked about; None: the last W, which are all of a tree

    def at_positions(self, values: Tensor, width: int) -> Tensor:
        """Return the values [A, W] of the positions, of those [A, N+1] of all nodes."""
        return values[:, -width:] if self.positions is None else values.gather(1, self.positions)

    def places(self, width: int) -> Tensor:
        """Return how many tokens of this round come before each position, [A, W] or [1, W]."""
        return self.at_positions(self.nodes.places(self.tokens), width)

    def counts(self, before: Tensor, width: int) -> Tensor:
        """Return how often each token comes before each position [A, W, V]; `before` [A, V] counts the committed."""
        return self.nodes.counts(self.tokens, before, width, self.positions)

    def walks(self, row: int, width: int) -> Iterable[Walk]:
        """Return walks along a row's tokens that together pass all positions."""
        positions = None if self.positions is None else self.positions[row].tolist()
        return self.nodes.walks(row, self.tokens[row].tolist(), width, positions)


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

    tokens: Tensor  # [A, N]
    proposed: Tensor  # [A] how many of the first K each row proposes
    probabilities: Tensor | None  # [A, K, V]; None: every proposal was certain
    entropies: Tensor | None = None  # [A, K] the draft's entropy at each, if asked for
    nodes: Nodes = IN_LINE
    distributions: Tensor | None = None  # [A, Q, V] what the nodes were drawn from; None: all were certain

    def first_line(self, length: int) -> "Proposal":
        """Return the proposals of the first line."""
        return self if self.tokens.shape[1] == length else self._replace(tokens=self.tokens[:, :length])

    def drawn_from(self, distribution: Tensor, token: Tensor, vocab_size: int) -> Tensor:
        """Return the q [A, V] that a token [A, 1] was drawn from, by the number of its distribution [A]."""
        if self.distributions is None:
            return torch.zeros(len(token), vocab_size, device=token.device).scatter_(1, token, 1.0)
        if self.nodes.all_have_distributions:
            return pick(self.distributions, distribution)
        q = pick(self.distributions, distribution.clamp(min=0))
        return torch.where((distribution == CERTAIN)[:, None], torch.zeros_like(q).scatter_(1, token, 1.0), q)

    @property
    def before_target(self) -> ProposedTokens:
        """The proposals that come before the target's positions."""
        return ProposedTokens(self.tokens, self.nodes)


class Exam(NamedTuple):
    """What the exact tests read and write: the proposals of a round, all that they are judged by, and the verdict."""

    proposal: Proposal
    scores: Tensor  # [A, N+1, V] of the target after each node, as the requests transform them
    rows: Rows
    plan: Plan
    noise: Noise
    verdict: Verdict  # which is written
    p: Tensor | None = None  # [A, N+1, V], the softmax of the scores, if some rule needs it
