"""The plan of a round: the work it has to do, known on the host before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ...engines import Step
from ..memory.model import Model
from .noise import MOST_SIBLINGS
from .rows import Rows

LEAST_WINDOW = 2  # tokens that a draft model reads first: it never saw the last proposal that stood, if it was its own


@dataclass
class Prepared:
    """The part of a frame that belongs to a drafter: the steps of its draft model."""

    steps: list[Step]


class Source(Protocol):
    """The part of a drafter that plans and frames read."""

    @property
    def name(self) -> str: ...
    @property
    def place(self) -> int: ...
    @property
    def samples(self) -> bool: ...
    @property
    def needs_model(self) -> bool: ...
    @property
    def model(self) -> Model | None: ...
    def load(self, requests: Sequence[Any], draft_length: int) -> None: ...
    def asked_for(self, line: int, rows: Rows, plan: Any) -> Tensor: ...
    def prepare(self, frame: Any) -> Prepared: ...


class ReadingFilter(Protocol):
    """The part of a filter that plans read."""

    @property
    def reads_ahead(self) -> bool: ...
    @property
    def on_host(self) -> bool: ...
    def commit(self, columns: dict[str, Tensor], tokens: Tensor, accepted: Tensor) -> None: ...


class Level(NamedTuple):
    """The most that any live row has on a level of its tree."""

    branches: int = 0  # beside its line
    children: int = 0  # ranks that those of one node may have


@dataclass(frozen=True)
class Plan:
    """Equal plans run the same operations."""

    batch: int
    draft_length: int  # K: the most that any live row proposes
    siblings: int = 0  # M: the most that any live row proposes beside its line
    branches: int = 0  # the most that any live row has beside the line of its tree
    levels: tuple[Level, ...] = ()  # of all trees, down to the last level where one has branches
    live: int | None = None  # entries of a row that its steps read; None: all
    sources: tuple[Source, ...] = ()  # the drafters of all rows that propose, of the first line of each
    beside: tuple[tuple[Source, ...], ...] = ()  # of the second line of rows that have one, the third, …
    window: int = LEAST_WINDOW  # committed tokens that a draft model reads first: as many as its cache may lack
    filters: tuple[ReadingFilter, ...] = ()  # filters that some row needs, in the order in which they apply
    draft_filters: tuple[ReadingFilter, ...] = ()  # if own_draft: the filters of the draft
    own_draft: bool = False  # the draft of some row samples at a temperature of its own
    ragged: bool = False  # some row proposes fewer than K tokens
    rejection: bool = False  # some row samples by the rejection rule, which judges its proposals together
    tokenwise: bool = False  # some row samples by the rule that judges them one by one
    coupled: bool = False  # some row is greedy or samples by the coupled rule
    gumbel: bool = False  # some row samples by the coupled rule
    lenient: bool = False  # some row accepts more than lossless decoding would
    logprobs: int | None = None
    traced: bool = False
    entropies: bool = False  # some row chooses its draft length by the draft's entropy

    def __hash__(self) -> int:
        return self._hash  # asked for in each round

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, one.name) for one in fields(self)))

    def __post_init__(self) -> None:
        if self.draft_length and not self.sources:
            raise ValueError(f"a plan of {self.draft_length} proposals has no source that makes them")

    @cached_property
    def lines(self) -> tuple[tuple[Source, ...], ...]:
        """The drafters of each line that rows may have."""
        return self.sources, *self.beside

    @cached_property
    def is_tree(self) -> bool:
        """Whether some row has more than one line."""
        return bool(self.siblings or self.beside or self.branches)

    @cached_property
    def beyond(self) -> int:
        """The most proposals that a row may have behind its first line."""
        return max(self.siblings, self.branches, len(self.beside) * self.draft_length)

    @cached_property
    def steps(self) -> tuple[object, ...]:
        """The parts of the plan that the tensors and the steps of a round depend on, `live` among them.

        Where rows propose equally many tokens, nothing writes how many are verified.
        """
        own = [
            (bool(samplers), *(source for source in sources if source.needs_model))
            for samplers, sources in zip(self.samplers, self.lines, strict=True)
        ]
        sizes = self.batch, self.draft_length, self.siblings, self.branches, self.levels, self.window
        return *sizes, self.ragged, *own

    @cached_property
    def drafters(self) -> tuple[Source, ...]:
        """The drafters of all lines."""
        return tuple(dict.fromkeys(source for sources in self.lines for source in sources))

    @cached_property
    def samplers(self) -> tuple[tuple[Source, ...], ...]:
        """The sources of each line that draw their tokens one after another, draft models first."""
        each = [[source for source in sources if source.samples] for sources in self.lines]
        return tuple(tuple(sorted(found, key=lambda source: not source.needs_model)) for found in each)

    @cached_property
    def copiers(self) -> tuple[Source, ...]:
        """The sources that offer all their tokens at once."""
        return tuple(source for source in self.drafters if not source.samples)

    @cached_property
    def with_model(self) -> tuple[Source, ...]:
        """The sources that run a draft model."""
        return tuple(source for source in self.drafters if source.needs_model)

    @cached_property
    def drafts(self) -> tuple[Model, ...]:
        """The draft models that they run."""
        return tuple(dict.fromkeys(source.model for source in self.with_model if source.model is not None))

    @property
    def ranks(self) -> int:
        """The most siblings beside one proposal."""
        return min(self.siblings, MOST_SIBLINGS)

    @property
    def children(self) -> int:
        """The most children of one node, counting siblings and the proposal that they are beside."""
        return max(1 + self.ranks, *(level.children for level in self.levels)) if self.levels else 1 + self.ranks

    @cached_property
    def draws(self) -> bool:
        """Whether some row draws its tokens by uniforms."""
        return self.rejection or self.tokenwise

    @cached_property
    def probabilities(self) -> bool:
        """Whether the round needs p and q themselves, not only the winning tokens."""
        return self.draws or self.traced

    @cached_property
    def reads_ahead(self) -> bool:
        """Whether some filter depends on the tokens of the round itself."""
        return any(one.reads_ahead for one in (*self.filters, *self.draft_filters))

    @cached_property
    def recordable(self) -> bool:
        """Whether all of the round happens on the device."""
        return not any(one.on_host for one in self.filters)
