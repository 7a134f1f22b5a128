"""The drafting that a request asks for: how many proposals, and from where; both are checked together."""

from collections.abc import Mapping
from dataclasses import dataclass

from ...engines import MAX_DRAFT_LENGTH, RequestError
from ..drafters import DRAFTERS, NONE
from ..sampling.params import SamplingParams
from .chooser import Chooser, Wanted
from .controller import Controller
from .entropy import ByEntropy, EntropyRule

AUTO = "auto"  # the controller chooses the draft length, anew for each round
MIXED = "mixed"  # the controller also chooses the drafter, of those that are `in_mixed`
DEFAULT_DRAFT_LENGTH = 4

DraftLength = int | str | EntropyRule  # a number, "auto", or a rule of its own


@dataclass(frozen=True)
class Drafting:
    """A draft length and a drafter that the decoder's rules have checked."""

    length: DraftLength
    drafter: str


class DraftingRules:
    """The rules for what the requests of one decoder may ask for."""

    def __init__(self, unavailable: Mapping[str, str], longest: int, controller: Controller | None) -> None:
        self.unavailable = unavailable  # drafters that the decoder lacks, and why
        self.longest = longest  # the most proposals in a round
        self.controller = controller

    @property
    def drafters(self) -> tuple[str, ...]:
        """The sources of proposals that the decoder has."""
        return tuple(name for name in DRAFTERS if name not in self.unavailable)

    def check(self, length: object, drafter: object) -> Drafting:
        """Refuse a choice that is impossible here or contradicts itself."""
        names = (*DRAFTERS, NONE, MIXED)
        if not isinstance(drafter, str) or drafter not in names:
            raise RequestError(f"drafter is {drafter!r}, expected one of {', '.join(names)}", "drafter")
        if drafter in self.unavailable:
            raise RequestError(self.unavailable[drafter], "drafter")
        if length == AUTO:
            self._require_costs(drafter)
        elif drafter == MIXED:
            raise RequestError(f"drafter mixed needs draft_length auto, not {length!r}; name one drafter")
        elif isinstance(length, EntropyRule):
            self._require_entropy(drafter)
            if length.longest > self.longest:
                raise RequestError(f"longest is {length.longest}, expected at most {self.longest}")
        elif type(length) is not int or not 0 <= length <= self.longest:
            limit = "" if self.longest == MAX_DRAFT_LENGTH else ", the longest that a plan was compiled for"
            raise RequestError(
                f"draft_length is {length!r}, expected auto or a whole number from 0 to {self.longest}{limit}",
                "draft_length",
            )
        assert isinstance(length, int | str | EntropyRule)
        return Drafting(length, drafter)

    def default(self, drafter: str, params: SamplingParams | None = None) -> DraftLength:
        """Return auto if its costs are known and it cannot change a text that was promised, else a number."""
        known = self.controller is not None and drafter in self.controller.costs.acceptance
        if drafter == MIXED or (known and not (params and params.keeps_its_draft)):
            return AUTO
        return min(DEFAULT_DRAFT_LENGTH, self.longest)

    def chooser(self, drafting: Drafting) -> Chooser:
        """Make the chooser of one request."""
        length, drafter = drafting.length, drafting.drafter
        if isinstance(length, EntropyRule):
            return ByEntropy(length, drafter)
        if isinstance(length, int):
            return Chooser(Wanted(length, drafter))
        if drafter == NONE:
            return Chooser()
        assert self.controller is not None
        return self.controller.begin(self._measured() if drafter == MIXED else [drafter])

    def _measured(self) -> list[str]:
        assert self.controller is not None
        return [name for name, kind in DRAFTERS.items() if kind.in_mixed and name in self.controller.costs.acceptance]

    def _require_costs(self, drafter: str) -> None:
        if drafter == NONE:
            return
        if self.controller is None:
            raise RequestError(
                "draft_length auto needs to know what rounds cost here; run trt-spec tune, or give a number"
            )
        measured = self.controller.costs.acceptance
        if drafter not in (*measured, MIXED):
            raise RequestError(
                f"draft_length auto knows the costs of drafter {' and '.join(measured)} only, not of {drafter}; "
                "run trt-spec tune again, or give a number"
            )

    def _require_entropy(self, drafter: str) -> None:
        samplers = [name for name, kind in DRAFTERS.items() if kind.samples]
        if drafter not in (*samplers, NONE):
            raise RequestError(
                f"drafter {drafter} has no entropy to choose a draft length by; use {' or '.join(samplers)}, or give "
                "a number"
            )
