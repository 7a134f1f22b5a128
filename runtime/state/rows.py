"""The state of the live requests: row r of every tensor belongs to one request."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import accumulate, chain
from math import inf

import torch
from torch import Tensor

from ...engines import MAX_DRAFT_LENGTH, WIDEST_STEP
from .asked import Share
from .indexing import pick
from .noise import constants, uniforms
from .place import on_host
from .shapes import LINE, MOST_BRANCHES, MOST_LINES, Shape

OPENING = 4  # tokens at the end of a prompt that are repeated before its source
STRETCH = 64  # lengths whose uniforms are made at once, at most: hashing a few numbers costs as much as hashing many

LEAVES = MAX_DRAFT_LENGTH  # the level of what is placed once the line is known, after all others

Columns = dict[str, Tensor]  # by name, one entry per row: what filters and drafters know of each request


@dataclass
class Rows:
    """Live rows come first, without gaps. Filters and drafters keep what they know of them in columns."""

    tokens: Tensor  # [M, L] int64, committed up to `length`
    length: Tensor  # [M] int64
    images_end: Tensor  # [M] int64, the place after the last entry of an image, before which no round reads
    source: Tensor  # [M, S] int64, tokens of the row's source at the end, and -1 before them
    asked: Tensor  # [M, 4, drafters] int64, how many proposals each of the row's lines takes from each drafter
    turns: Tensor  # [M, 4] int64, how many lines before it are of the same drafter
    more: Tensor  # [M] bool: the row has more than one line
    begins: Tensor  # [M, 18] int64, how many branches come before each level, before leaves, and in all
    branches: Tensor  # [M, 48, 2] int64, of each its parent in the level before and its rank, if they are fixed
    adapts: Tensor  # [M] bool: branches are not fixed; as many go where the draft's scores say, down to the same depth
    depth: Tensor  # [M] int64, of the tree
    entropy_limit: Tensor  # [M] float32, the row proposes no further where the draft's entropy exceeds it
    coupled: Tensor  # [M] bool: greedy or the coupled rule
    rejection: Tensor  # [M] bool: the rejection rule, which judges proposals together
    seed: Tensor  # [M, 2] int64, 32-bit words
    noise_scale: Tensor  # [M] float32, 0 for greedy rows
    lenience: Tensor  # [M] float32, 1 is lossless
    uniforms: Tensor  # [M, 2 · STRETCH, 65, 2] float64 in (0, 1), for rounds that begin in an even or odd stretch
    columns: Columns  # of filters and drafters

    @classmethod
    def allocate(cls, rows: int, length: int, drafters: int, device: str, columns: Columns, copied: int = 0) -> "Rows":
        def whole(*size: int) -> Tensor:
            return torch.zeros(rows, *size, dtype=torch.int64, device=device)

        def real(*size: int) -> Tensor:
            return torch.zeros(rows, *size, device=device)

        tokens = whole(length)
        room = copied + OPENING if copied and not on_host(device) else 0  # on a GPU what is recorded must not move
        constants(tokens.device)
        return cls(
            tokens=tokens,
            length=whole(),
            images_end=whole(),
            source=whole(room) - 1,
            asked=whole(MOST_LINES, drafters),
            turns=whole(MOST_LINES),
            more=torch.zeros(rows, dtype=torch.bool, device=device),
            begins=whole(LEAVES + 2),
            branches=whole(MOST_BRANCHES, 2),
            adapts=torch.zeros(rows, dtype=torch.bool, device=device),
            depth=whole(),
            entropy_limit=real(),
            coupled=torch.zeros(rows, dtype=torch.bool, device=device),
            rejection=torch.zeros(rows, dtype=torch.bool, device=device),
            seed=whole(2),
            noise_scale=real(),
            lenience=real(),
            uniforms=torch.full((rows, 2 * STRETCH, WIDEST_STEP, 2), 0.5, dtype=torch.float64, device=device),
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

    def note_source(self, row: int, prompt: Sequence[int], source: Sequence[int]) -> None:
        """Note what may be copied of a row's source; the end of its prompt leads into that."""
        tokens = torch.tensor([*prompt[-OPENING:], *source])
        if (lacking := len(tokens) - self.source.shape[1]) > 0:
            self.source = torch.nn.functional.pad(self.source, (lacking, 0), value=-1)
        self.source[row] = -1
        self.source[row, -len(tokens) :] = tokens

    def ask(self, shares: Sequence[Share], places: Mapping[str, int]) -> None:
        """Set the lines of the live rows, whether a row has more than one, and where its first ends."""
        live, (_, most, drafters) = len(shares), self.asked.shape
        counts = [[[0] * drafters for _ in range(most)] for _ in shares]
        turns = [[0] * most for _ in shares]
        for row, share in enumerate(shares):
            for line, (name, count) in enumerate(share.lines):
                counts[row][line][places[name]] = count
                turns[row][line] = share.names[:line].count(name)
        limits = [inf if one.entropy_limit in (None, 1) else one.entropy_limit for one in shares]
        self.asked[:live] = torch.tensor(counts)
        self.turns[:live] = torch.tensor(turns)
        self.more[:live] = torch.tensor([one.more for one in shares])
        self.entropy_limit[:live] = torch.tensor(limits)

    def grow(self, shares: Sequence[Share], adapt: Sequence[bool]) -> None:
        """Set the branches that the live rows have; of rows that `adapt` only how many counts, and how deep they go."""
        live, shapes = len(shares), [one.shape if one.shape.beyond else None for one in shares]
        begins, branches = zip(*map(branches_of, shapes), strict=True)
        self.begins[:live], self.branches[:live] = torch.stack(begins), torch.stack(branches)
        self.adapts[:live] = torch.tensor(adapt)
        self.depth[:live] = torch.tensor([0 if one is None else one.length for one in shapes])

    def fill_uniforms(self, first: int, count: int, lengths: range, beyond: bool = False) -> None:
        """Make the uniforms of so many rows for rounds that begin at these lengths, which are of one stretch.

        Those beyond a line are made only if asked.
        """
        width, place = WIDEST_STEP if beyond else LINE, lengths.start % (2 * STRETCH)
        length = torch.arange(lengths.start, lengths.stop, device=self.length.device)
        rows, places = slice(first, first + count), slice(place, place + len(lengths))
        self.uniforms[rows, places, :width] = uniforms(self.seed[rows], length, width)

    def round_uniforms(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the uniforms [A, 17] of this round, to draw each token and to test it, and those beyond."""
        found = pick(self.uniforms, self.length % (2 * STRETCH))
        draw, test = found[:, :LINE].unbind(-1)
        return draw, test, found[:, LINE:]


@cache
def branches_of(shape: Shape | None) -> tuple[Tensor, Tensor]:
    """Return how many branches come before each level, and the parent and rank of each."""
    begins, branches = torch.zeros(LEAVES + 2), torch.zeros(MOST_BRANCHES, 2)
    if shape is not None:
        level = LEAVES if shape.leaves else 0
        ends = torch.tensor([*accumulate(map(len, shape.levels))])
        begins[level + 1 : level + 1 + len(ends)] = ends
        begins[level + 1 + len(ends) :] = shape.beyond
        branches[: shape.beyond] = torch.tensor([*chain.from_iterable(shape.levels)])
    return begins, branches
