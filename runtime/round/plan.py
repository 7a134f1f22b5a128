"""The plan of a round: the work it has to do, known on the host before it starts."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, cast

from ..sampling.noise import MOST_SIBLINGS

if TYPE_CHECKING:
    from ..drafters.drafter import Copier, Drafter, Sampler
    from ..sampling.filters import Filter


@dataclass(frozen=True)
class Plan:
    """Equal plans run the same operations."""

    batch: int
    draft_length: int  # K: the most that any live row proposes
    siblings: int = 0  # M: the most that any live row proposes beside its line
    live: int | None = None  # entries of a row that its steps read; None: all
    sources: "tuple[Drafter, ...]" = ()  # the drafters of all rows that propose
    filters: "tuple[Filter, ...]" = ()  # filters that some row needs, in the order in which they apply
    draft_filters: "tuple[Filter, ...]" = ()  # if own_draft: the filters of the draft
    own_draft: bool = False  # the draft of some row samples at a temperature of its own
    ragged: bool = False  # some row proposes fewer than K tokens
    lines: bool = False  # beside rows with siblings, some row without any has a test that only lines have
    rejection: bool = False  # some row samples by the rejection rule, which judges its proposals together
    tokenwise: bool = False  # some row samples by the rule that judges them one by one
    coupled: bool = False  # some row is greedy or samples by the coupled rule
    gumbel: bool = False  # some row samples by the coupled rule
    lenient: bool = False  # some row accepts more than lossless decoding would
    logprobs: int | None = None
    traced: bool = False
    entropies: bool = False  # some row chooses its draft length by the draft's entropy

    def __post_init__(self) -> None:
        if self.draft_length and not self.sources:
            raise ValueError(f"a plan of {self.draft_length} proposals has no source that makes them")

    @cached_property
    def samplers(self) -> "tuple[Sampler, ...]":
        """The sources that draw their tokens one after another, the draft model first."""
        found = [cast("Sampler", source) for source in self.sources if source.samples]
        return tuple(sorted(found, key=lambda source: not source.needs_model))

    @cached_property
    def copiers(self) -> "tuple[Copier, ...]":
        """The sources that offer all their tokens at once."""
        return tuple(cast("Copier", source) for source in self.sources if not source.samples)

    @cached_property
    def with_model(self) -> "tuple[Drafter, ...]":
        """The sources that run the draft model."""
        return tuple(source for source in self.sources if source.needs_model)

    @property
    def ranks(self) -> int:
        """The most siblings beside one proposal."""
        return min(self.siblings, MOST_SIBLINGS)

    @property
    def draws(self) -> bool:
        """Whether some row draws its tokens by uniforms."""
        return self.rejection or self.tokenwise

    @property
    def probabilities(self) -> bool:
        """Whether the round needs p and q themselves, not only the winning tokens."""
        return self.draws or self.traced

    @cached_property
    def reads_ahead(self) -> bool:
        """Whether some filter depends on the tokens of the round itself."""
        return any(one.reads_ahead for one in (*self.filters, *self.draft_filters))

    @property
    def recordable(self) -> bool:
        """Whether all of the round happens on the device."""
        return not any(one.on_host for one in self.filters)
