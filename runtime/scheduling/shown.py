"""What a decoder shows of itself while it runs, for services, measurements and proofs."""

from collections.abc import Mapping
from pathlib import Path

from ...engines import Bundle
from ..images.reader import ImageReader
from ..lengths.costs import Costs
from ..lengths.drafting import DraftingRules
from ..memory.held import held_bytes
from ..memory.model import Model
from ..memory.prefixes import Prefixes
from ..requests.metrics import Speculation
from ..state.asked import DraftLength
from ..state.frame import Frame
from .intake import Intake
from .models import Models
from .occupants import Occupant
from .scheduler import Scheduler


class Shown:
    """The properties of a decoder; none of them changes anything."""

    bundle: Bundle
    max_batch: int
    target: Model
    _intake: Intake
    _models: Models
    _rules: DraftingRules
    _scheduler: Scheduler

    @property
    def speculation(self) -> Speculation:
        """The counts and times of speculation over all requests so far."""
        return self._scheduler.speculation

    @property
    def by_drafter(self) -> dict[str, Speculation]:
        """The counts of the rounds in which each drafter has proposed, over all requests so far."""
        return self._scheduler.by_drafter

    @property
    def adapters(self) -> Mapping[str, Path]:
        """The adapters that are loaded: the folder of each by its name."""
        pool = self._models.adapters
        return {} if pool is None else {name: one.folder for name, one in dict(pool.loaded).items()}

    @property
    def by_adapter(self) -> dict[str, Speculation]:
        """The counts of requests with each adapter that is loaded, since it was."""
        pool = self._models.adapters
        return {} if pool is None else self._scheduler.by_adapter(dict(pool.loaded))

    @property
    def prefixes(self) -> Prefixes:
        """The prefixes kept for requests that begin like others, and how much of the prompts was found there."""
        return self._scheduler.seating.prefixes

    @property
    def live(self) -> tuple[Occupant, ...]:
        """The requests that are decoding; occupant i has row i."""
        return tuple(self._scheduler.live)

    @property
    def cache_usage(self) -> float:
        """The share of the target's cache that holds tokens, out of all that it may hold."""
        most = self._models.most_tokens
        room = self.max_batch * self.bundle.capacity if most is None else max(1, most)
        return min(1.0, sum(self.target.cache.entries) / room)

    @property
    def held_bytes(self) -> dict[str, int]:
        """The bytes that each pool of memory holds now."""
        of_sources = sum(one.kept_bytes for one in self._models.encoders)
        of_sources += 0 if self._models.eyes is None else self._models.eyes.kept_bytes
        pool = self._models.adapters
        return held_bytes(self.bundle, self._models.all, of_sources, 0 if pool is None else pool.held_bytes)

    @property
    def last_frame(self) -> Frame | None:
        """The tensors of the last round and the engines' steps over them, for measuring."""
        return self._scheduler.frame

    @property
    def recorded(self) -> bool:
        """Whether rounds that repeat run as recorded CUDA graphs."""
        return self._scheduler.recorded

    @property
    def recorded_kinds(self) -> int:
        """How many kinds of rounds are recorded now."""
        return self._scheduler.recorded_kinds

    @property
    def replayed(self) -> bool:
        """Whether the last round was such a graph."""
        return self._scheduler.replayed

    @property
    def longest_draft(self) -> int:
        """The most proposals that a round can verify."""
        return self._rules.longest

    @property
    def largest_comb(self) -> int:
        """The most proposals that a comb or a tree may have, 0 where the engine takes lines only."""
        return self._rules.most or 0

    @property
    def growing(self) -> tuple[str, ...]:
        """The drafters that can grow trees here."""
        return self._rules.growing

    @property
    def grammars_given_up(self) -> int:
        """The number of grammars that ended the process in which they were tried, by time or memory."""
        return self._intake.grammars.given_up

    @property
    def costs(self) -> Costs | None:
        """The costs that `trt-spec tune` measured for this bundle here; auto chooses by them."""
        return self._rules.controller.costs if self._rules.controller else None

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafters that this bundle has."""
        return self._rules.drafters

    @property
    def images(self) -> ImageReader | None:
        """What reads images for prompts, None where the target reads text alone."""
        return self._intake.images

    def default_draft_length(self, drafter: str) -> DraftLength:
        """Return what is drafted where nothing else is asked for: auto if its costs are known, else a number."""
        return self._rules.default(drafter)
