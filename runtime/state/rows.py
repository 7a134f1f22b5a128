"""The state of the live requests: row r of every tensor belongs to one request."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain

import torch
from torch import Tensor

from ...engines import MAX_DRAFT_LENGTH, WIDEST_STEP
from .indexing import pick
from .noise import LINE, MOST_BRANCHES, constants, uniforms
from .shapes import Levels

BLOCK = 64  # lengths whose uniforms are made at once, at most: hashing a few numbers costs as much as hashing many

NOWHERE = (0, 0)  # stands for a branch that a tree does not have

Columns = dict[str, Tensor]  # by name, one entry per row: what the filters know of each request


@dataclass
class Rows:
    """Live rows come first, without gaps. Each filter keeps what it knows of them in its columns."""

    tokens: Tensor  # [M, L] int64, committed up to `length`
    length: Tensor  # [M] int64
    asked: Tensor  # [M, sources] int64, how many proposals the row takes from each source
    line: Tensor  # [M, sources] int64, for which of its lines
    lines: Tensor  # [M] int64, how many it has
    siblings: Tensor  # [M] int64, how many proposals it has beside its only line
    levels: Tensor  # [M, 17] int64, how many branches its tree has before each level; the last: in all
    branches: Tensor  # [M, 48, 2] int64, of each its parent in the level before and its rank, if they are fixed
    adapts: Tensor  # [M] bool: branches are not fixed; as many go where the draft's scores say, down to the same depth
    depth: Tensor  # [M] int64, of the tree
    entropy_limit: Tensor  # [M] float32, the row proposes no further where the draft's entropy exceeds it
    coupled: Tensor  # [M] bool: greedy or the coupled rule
    block: Tensor  # [M] bool: the rejection rule, which judges proposals together
    seed: Tensor  # [M, 2] int64, 32-bit words
    noise_scale: Tensor  # [M] float32, 0 for greedy rows
    lenience: Tensor  # [M] float32, 1 is lossless
    uniforms: Tensor  # [M, 2 · BLOCK, 65, 2] float64, for rounds that begin at a length of an even or odd block
    columns: Columns  # of the filters

    @classmethod
    def allocate(cls, rows: int, length: int, sources: int, device: str, columns: Columns) -> "Rows":
        def whole(*size: int) -> Tensor:
            return torch.zeros(rows, *size, dtype=torch.int64, device=device)

        def real(*size: int) -> Tensor:
            return torch.zeros(rows, *size, device=device)

        tokens = whole(length)
        constants(tokens.device)
        return cls(
            tokens=tokens,
            length=whole(),
            asked=whole(sources),
            line=whole(sources),
            lines=whole(),
            siblings=whole(),
            levels=whole(MAX_DRAFT_LENGTH + 1),
            branches=whole(MOST_BRANCHES, 2),
            adapts=torch.zeros(rows, dtype=torch.bool, device=device),
            depth=whole(),
            entropy_limit=real(),
            coupled=torch.zeros(rows, dtype=torch.bool, device=device),
            block=torch.zeros(rows, dtype=torch.bool, device=device),
            seed=whole(2),
            noise_scale=real(),
            lenience=real(),
            uniforms=torch.zeros(rows, 2 * BLOCK, WIDEST_STEP, 2, dtype=torch.float64, device=device),
            columns=columns,
        )

    def view(self, batch: int, first: int = 0) -> "Rows":
        """The first `batch` rows from `first` on, sharing memory."""
        return self._each(lambda tensor: tensor[first : first + batch])

    def move(self, source: int, destination: int) -> None:
        def copy(tensor: Tensor) -> Tensor:
            tensor[destination] = tensor[source]
            return tensor

        self._each(copy)

    def swap(self, one: int, other: int) -> None:
        def exchange(tensor: Tensor) -> Tensor:
            tensor[[one, other]] = tensor[[other, one]]
            return tensor

        self._each(exchange)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Rows":
        own = {one.name: change(getattr(self, one.name)) for one in fields(self) if one.name != "columns"}
        return Rows(**own, columns={name: change(tensor) for name, tensor in self.columns.items()})

    def ask(
        self,
        counts: Sequence[Sequence[int]],
        lines: Sequence[Sequence[int]],
        siblings: Sequence[int],
        entropy_limits: Sequence[float],
    ) -> None:
        """Set what the live rows take of each source, for which line, how many siblings, and the entropy at its end."""
        self.asked[: len(counts)] = torch.tensor(counts)
        self.line[: len(counts)] = torch.tensor(lines)
        self.lines[: len(counts)] = torch.tensor([max(each, default=0) + 1 for each in lines])
        self.siblings[: len(counts)] = torch.tensor(siblings)
        self.entropy_limit[: len(counts)] = torch.tensor(entropy_limits)

    def grow(self, levels: Sequence[Levels], adapt: Sequence[bool]) -> None:
        """Set the trees that the live rows have; those of rows that `adapt` only say how many branches there are."""
        live, width = len(levels), self.levels.shape[1]
        begins = [[*accumulate(map(len, own), initial=0)] for own in levels]
        each = [[*chain.from_iterable(own)] for own in levels]
        self.levels[:live] = torch.tensor([own + own[-1:] * (width - len(own)) for own in begins])
        self.branches[:live] = torch.tensor([own + [NOWHERE] * (MOST_BRANCHES - len(own)) for own in each])
        self.adapts[:live] = torch.tensor(adapt)
        self.depth[:live] = torch.tensor([len(own) for own in levels])

    @property
    def has_tree(self) -> Tensor:
        """Whether each row [A] grows a tree."""
        return self.levels[:, -1] > 0

    def fill_uniforms(self, first: int, count: int, lengths: range, beyond: bool = False) -> None:
        """Make the uniforms of so many rows for rounds that begin at these lengths, which are of one block.

        Those beyond a line are made only if asked.
        """
        width, place = WIDEST_STEP if beyond else LINE, lengths.start % (2 * BLOCK)
        length = torch.arange(lengths.start, lengths.stop, device=self.length.device)
        rows, places = slice(first, first + count), slice(place, place + len(lengths))
        self.uniforms[rows, places, :width] = uniforms(self.seed[rows], length, width)

    def round_uniforms(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the uniforms [A, 17] of this round, to draw each token and to test it, and those beyond."""
        found = pick(self.uniforms, self.length % (2 * BLOCK))
        draw, test = found[:, :LINE].unbind(-1)
        return draw, test, found[:, LINE:]
