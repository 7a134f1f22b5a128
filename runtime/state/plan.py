"""The plan of a round: the work it has to do, known on the host before it starts."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...engines import Step
from ..memory.model import Model
from .line import IN_LINE
from .rows import Rows
from .tree import Nodes, Tree

LEAST_WINDOW = 2  # tokens that a draft model reads first: it never saw the last accepted proposal, if that was its own


@dataclass
class Prepared:
    """The part of a frame that belongs to a drafter: the steps of its draft model."""

    steps: list[Step]


class PlannedDrafter(Protocol):
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
    def looks_ahead(self) -> bool: ...
    @property
    def model(self) -> Model | None: ...
    def load(self, requests: Sequence[Any], draft_length: int) -> None: ...
    def asked(self, line: int, rows: Rows) -> Tensor: ...
    def prepare(self, frame: Any, line: Any) -> Prepared: ...
    def keep(self, rows: Rows, frame: Any) -> None: ...


class ReadingFilter(Protocol):
    """The part of a filter that plans read."""

    @property
    def reads_proposals(self) -> bool: ...
    @property
    def reported(self) -> bool: ...
    @property
    def on_host(self) -> bool: ...
    def commit(self, columns: dict[str, Tensor], tokens: Tensor, accepted: Tensor) -> None: ...


class Level(NamedTuple):
    """The most that any live row has on a level beside its line."""

    branches: int = 0
    children: int = 1  # ranks that those of one node may have


NO_LEVEL = Level()


@dataclass(frozen=True)
class Plan:
    """Equal plans run the same operations."""

    batch: int
    draft_length: int  # K: the most that any line of a live row proposes
    lines: tuple[tuple[PlannedDrafter, ...], ...] = ((),)  # the drafters of all rows, of each line that rows may have
    branches: int = 0  # the most that any live row has beside its line
    levels: tuple[Level, ...] = ()  # of branches that others may follow, down to the last level that has some
    leaves: Level = NO_LEVEL  # of branches that nothing follows, beside all of a line
    look_aheads: int = 0  # the most that the target reads after the last committed token of any row
    entries_read: int | None = None  # entries of a row that its steps read; None: all
    adapters: int = 0  # columns of adapters that the target reads
    since: int = 1  # tokens of a row that recurrent layers may have to absorb
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

    def nodes(self, device: torch.device) -> Nodes:
        """Return how the proposals follow one another, with fixed memory for those that branch."""
        if not self.beyond:
            return IN_LINE
        return Tree(self.batch, self.draft_length, self.have_distributions, self.branches, device)

    def __hash__(self) -> int:
        return self._hash  # asked for in each round

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(getattr(self, one.name) for one in fields(self)))

    def __post_init__(self) -> None:
        if self.draft_length and not any(self.lines):
            raise ValueError(f"a plan of {self.draft_length} proposals has no drafter that makes them")

    @cached_property
    def beyond(self) -> int:
        """The most proposals that a row may have after its first line."""
        return max(self.branches, (len(self.lines) - 1) * self.draft_length)

    @cached_property
    def turns(self) -> int:
        """The most nodes that may follow the same tokens."""
        return max(len(self.lines), self.leaves.children, *(level.children for level in self.levels))

    @cached_property
    def deepest(self) -> int:
        """The most that may be accepted after the place where a first line is rejected."""
        if len(self.lines) > 1:
            return self.draft_length
        return max(len(self.levels), int(self.leaves.branches > 0))

    @cached_property
    def steps(self) -> tuple[object, ...]:
        """The parts of the plan that the tensors and the steps of a round depend on, `entries_read` among them.

        Where rows propose equally many tokens, nothing writes how many are verified.
        """
        own = [
            (bool(samplers), *(drafter for drafter in drafters if drafter.needs_model))
            for samplers, drafters in zip(self.samplers, self.lines, strict=True)
        ]
        sizes = self.batch, self.draft_length, self.branches, self.levels, self.look_aheads, self.window, self.since
        return *sizes, self.adapters, self.turns, self.ragged, self.picks_best, *own

    @cached_property
    def drafters(self) -> tuple[PlannedDrafter, ...]:
        """The drafters of all lines."""
        return tuple(dict.fromkeys(drafter for drafters in self.lines for drafter in drafters))

    def lines_of(self, drafter: PlannedDrafter) -> int:
        """Return the most lines that a row may have of a drafter."""
        return sum(drafter in drafters for drafters in self.lines)

    @cached_property
    def samplers(self) -> tuple[tuple[PlannedDrafter, ...], ...]:
        """The drafters of each line that draw their tokens one after another, draft models first."""
        each = [[drafter for drafter in drafters if drafter.samples] for drafters in self.lines]
        return tuple(tuple(sorted(found, key=lambda drafter: not drafter.needs_model)) for found in each)

    @cached_property
    def copiers(self) -> tuple[PlannedDrafter, ...]:
        """The drafters that offer all their tokens at once."""
        return tuple(drafter for drafter in self.drafters if not drafter.samples)

    @cached_property
    def with_model(self) -> tuple[PlannedDrafter, ...]:
        """The drafters that run a draft model."""
        return tuple(drafter for drafter in self.drafters if drafter.needs_model)

    @cached_property
    def looking_ahead(self) -> tuple[PlannedDrafter, ...]:
        """The drafters for whose next proposals the target reads look-aheads."""
        return tuple(drafter for drafter in self.drafters if drafter.looks_ahead)

    @cached_property
    def drafts(self) -> tuple[Model, ...]:
        """The draft models that they run."""
        return tuple(dict.fromkeys(drafter.model for drafter in self.with_model if drafter.model is not None))

    @cached_property
    def have_distributions(self) -> tuple[bool, ...]:
        """Whether tokens of each line are drawn from a distribution; what others copy is certain."""
        return tuple(any(drafter.samples or drafter.needs_model for drafter in drafters) for drafters in self.lines)

    @cached_property
    def draws(self) -> bool:
        """Whether some row draws its tokens by uniforms."""
        return self.rejection or self.tokenwise

    @cached_property
    def picks_best(self) -> bool:
        """Whether nothing is asked of the target's logits but the best token after each token of a line."""
        drawn = self.draws or self.gumbel or self.lenient or bool(self.filters)
        reporting = self.traced or self.entropies or self.logprobs is not None
        return not (drawn or reporting or self.beyond or self.look_aheads)

    @cached_property
    def probabilities(self) -> bool:
        """Whether the round needs p and q themselves, not only the winning tokens."""
        return self.draws or self.traced

    @cached_property
    def reads_proposals(self) -> bool:
        """Whether some filter depends on the tokens of the round itself."""
        return any(one.reads_proposals for one in (*self.filters, *self.draft_filters))

    @cached_property
    def reporting(self) -> tuple[ReadingFilter, ...]:
        """The filters whose outcome some row reports as log-probs; none if all report the model's own scores."""
        ends = [place for place, one in enumerate(self.filters, 1) if one.reported and self.logprobs is not None]
        return self.filters[: max(ends, default=0)]

    @cached_property
    def recordable(self) -> bool:
        """Whether all of the round happens on the device."""
        return not any(one.on_host for one in self.filters)
