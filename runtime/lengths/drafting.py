"""The drafting that a request asks for: how many proposals, and from where; both are checked together."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Self

from ...engines import MAX_DRAFT_LENGTH, Engine, RequestError
from ..acceptance.filters import FILTERS
from ..acceptance.sampling_params import SamplingParams
from ..drafters import DRAFTERS, Drafter
from ..state.asked import (
    AUTO,
    BESIDE,
    DEFAULT_DRAFT_LENGTH,
    MIXED,
    NONE,
    Drafting,
    DraftLength,
    EntropyRule,
    Share,
    refuse_length_of_mixed,
)
from ..state.shapes import MOST_LINES, Shape, line, read_shape, refuse_large
from .chooser import Chooser
from .controller import Controller
from .costs import Costs, require_costs
from .entropy import ByEntropy


class DraftingRules:
    """The rules for what the requests of one decoder may ask for."""

    def __init__(
        self,
        unavailable: Mapping[str, str],
        longest: int,
        most: int | None,
        controller: Controller | None,
        treeless: Mapping[str, str],
        beamless: Mapping[str, str],
    ) -> None:
        self.unavailable = unavailable  # drafters that the decoder lacks, and why
        self.longest = longest  # the most proposals in a line
        self.most = most  # the most in a shape; None: the engine takes single lines only
        self.controller = controller
        self.treeless = treeless  # drafters that it has but that can grow no tree, and why
        self.beamless = beamless  # those that can search for no beams, and why

    @classmethod
    def of(
        cls,
        engine: Engine,
        drafters: Mapping[str, Drafter],
        unavailable: Mapping[str, str],
        beamless: Mapping[str, str],
        costs: Costs | None,
    ) -> Self:
        """Say what requests may ask for where the target's engine verifies so many tokens, and has these drafters."""
        most = engine.verify_width - 1
        most -= max((one.look_aheads(MAX_DRAFT_LENGTH) for one in drafters.values()), default=0)
        longest = min(most, MAX_DRAFT_LENGTH)
        treeless = {name: reason for name, one in drafters.items() if (reason := one.treeless)}
        controller = Controller(costs, longest, drafters.keys() - treeless, most) if costs else None
        return cls(unavailable, longest, most if engine.takes_trees else None, controller, treeless, beamless)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafters that the decoder has."""
        return tuple(name for name in DRAFTERS if name not in self.unavailable)

    @property
    def growing(self) -> tuple[str, ...]:
        """The drafters that can grow trees."""
        return tuple(name for name in self.drafters if name not in self.treeless)

    def check(self, length: object, drafter: object, params: SamplingParams) -> Drafting:
        """Refuse a choice that is impossible here or contradicts itself."""
        names = drafter.split(BESIDE) if isinstance(drafter, str) else []
        known = {*DRAFTERS, *(() if len(names) > 1 else (NONE, MIXED))}
        if not isinstance(drafter, str) or not known.issuperset(names):
            listed = ", ".join((*self._listed, NONE, MIXED))
            raise RequestError(
                f"drafter is {reprlib.repr(drafter)}, expected one of {listed}; or several, as model+suffix", "drafter"
            )
        for name in names:
            if name in self.unavailable:
                raise RequestError(self.unavailable[name], "drafter")
        asked = _parsed(length)
        if params.num_beams > 1:
            self._check_beams(asked, length, drafter)
        elif len(names) > 1:
            self._check_lines(asked, length, names, params)
        elif length == AUTO:
            require_costs(self.controller.costs if self.controller else None, drafter)
            return Drafting(None, drafter, self._beyond_of_auto(params), _look_aheads(names))
        elif drafter == MIXED:
            refuse_length_of_mixed(length)
        elif isinstance(asked, EntropyRule):
            self._require_sampler(drafter, "has no entropy to choose a draft length by")
            if asked.longest > self.longest:
                raise RequestError(f"longest is {asked.longest}, expected at most {self.longest}")
        elif asked is None or (asked.is_number and asked.length > self.longest):
            raise RequestError(
                f"draft_length is {length!r}, expected auto, a whole number from 0 to {self.longest}{self._limit}, "
                "a comb like 5+3, or a tree like 4/12 or 3x2x1",
                "draft_length",
            )
        elif not asked.is_number:
            self._check_shape(asked, drafter, params)
        assert asked is not None
        return Drafting(asked, drafter, asked.beyond if isinstance(asked, Shape) else 0, _look_aheads(names))

    def _check_beams(self, asked: Shape | EntropyRule | None, length: object, drafter: str) -> None:
        for name in (NONE, drafter):
            if name in self.beamless:
                raise RequestError(f"num_beams needs {self.beamless[name]}", "num_beams")
        is_tree = isinstance(asked, Shape) and not asked.leaves and not asked.fixed and asked.nodes <= (self.most or 0)
        if not isinstance(asked, Shape) or not (asked.is_number or is_tree) or asked.length > self.longest:
            raise RequestError(
                f"draft_length is {length!r}, expected beside num_beams how many tokens the draft searches ahead, from "
                f"0 to {self.longest}, or a tree like 4/24",
                "draft_length",
            )

    def _beyond_of_auto(self, params: SamplingParams) -> int:
        """Return the most that a round may choose to have beside its line, of what was measured."""
        if self.controller is None or self.most is None or _judged_in_lines_only(params):
            return 0
        room = self.most - self.longest if params.draft_decides else self.most - 1
        costs = self.controller.costs
        return max((n for n in (*costs.siblings, *(tree.beyond for tree in costs.trees)) if n <= room), default=0)

    def default(self, drafter: str, params: SamplingParams | None = None) -> DraftLength:
        """Return auto if its costs are known and it cannot change a text that was promised, else a number."""
        known = self.controller is not None and drafter in self.controller.costs.acceptance
        if params is not None and params.num_beams > 1:
            return min(DEFAULT_DRAFT_LENGTH, self.longest)
        if drafter == MIXED or (known and not (params and params.keeps_its_draft)):
            return AUTO
        return min(DEFAULT_DRAFT_LENGTH, self._longest_of(drafter.count(BESIDE) + 1))

    def _longest_of(self, lines: int) -> int:
        """Return the most proposals in each of so many lines."""
        return self.longest if lines == 1 or self.most is None else min(self.longest, self.most // lines)

    def chooser(self, drafting: Drafting, adapter: object = None) -> Chooser:
        """Make the chooser of one request, for which the target has this adapter."""
        length, drafter = drafting.length, drafting.drafter
        if isinstance(length, EntropyRule):
            return ByEntropy(length, drafter)
        if length is not None:
            return Chooser(Share.of(length, drafter))
        if drafter == NONE:
            return Chooser()
        assert self.controller is not None
        return self.controller.begin(self._measured() if drafter == MIXED else [drafter], drafting.beyond, adapter)

    def _measured(self) -> list[str]:
        assert self.controller is not None
        return [name for name, kind in DRAFTERS.items() if kind.in_mixed and name in self.controller.costs.acceptance]

    @property
    def _listed(self) -> list[str]:
        """The drafters that a refusal names: those of further drafts only where the bundle has these."""
        return [name for name, kind in DRAFTERS.items() if kind.usual or name not in self.unavailable]

    @property
    def _limit(self) -> str:
        return "" if self.longest == MAX_DRAFT_LENGTH else ", the most that a plan was compiled for"

    def _check_shape(self, shape: Shape, drafter: str, params: SamplingParams) -> None:
        """Refuse branches that the drafter cannot make, the engine cannot verify, or these parameters cannot have."""
        if self.most is None:
            raise RequestError(
                f"this engine verifies lines of proposals only, not {shape}; give a number", "draft_length"
            )
        if shape.leaves:
            self._require_sampler(drafter, "can put nothing beside its proposals")
        elif drafter in self.treeless:
            able = " or ".join(name for name in self._listed if name in self.growing)
            instead = f"use {able}, or give a number" if able else "give a number, or a comb like 5+3"
            raise RequestError(f"drafter {drafter} {self.treeless[drafter]}; {instead}", "drafter")
        refuse_large(shape, self.longest, self.most, self._limit)
        if shape.beyond > self.most - self.longest and params.draft_decides:
            raise RequestError(
                f"draft_length {shape} needs steps of {self.longest + shape.beyond + 1} tokens where lines are long, "
                f"this engine verifies at most {self.most + 1}; use rule coupled, whose text depends on no branch",
                "draft_length",
            )
        if shape.beyond and (lack := _judged_in_lines_only(params)):
            raise RequestError(
                f"draft_length {shape} has branches, which {lack} cannot be used with; give a number", "draft_length"
            )

    def _check_lines(
        self, asked: Shape | EntropyRule | None, length: object, names: Sequence[str], params: SamplingParams
    ) -> None:
        drafter, count = BESIDE.join(names), len(names)
        for name in names:
            if names.count(name) > 1 and not DRAFTERS[name].has_copies:
                able = " or ".join(other for other, kind in DRAFTERS.items() if kind.has_copies)
                raise RequestError(
                    f"drafter {drafter} names {name} twice, which has one line to propose; name it once, or {able} "
                    "again",
                    "drafter",
                )
        if alone := next((name for name in names if not DRAFTERS[name].beside_others), None):
            raise RequestError(
                f"drafter {drafter} has a line of {alone}, which goes with no other; leave it out", "drafter"
            )
        if self.most is None:
            raise RequestError(f"this engine verifies one line of proposals only, not {drafter}; name one", "drafter")
        if count > MOST_LINES:
            raise RequestError(f"drafter {drafter} names {count} drafters, expected at most {MOST_LINES}", "drafter")
        most = self._longest_of(count)
        if not isinstance(asked, Shape) or not asked.is_number or asked.length > most:
            given = str(asked) if isinstance(asked, Shape) else repr(length)
            raise RequestError(
                f"draft_length is {given}, expected a whole number from 0 to {most} for each drafter of {drafter}",
                "draft_length",
            )
        if count * self.longest > self.most and params.draft_decides:
            raise RequestError(
                f"drafter {drafter} needs steps of {count * self.longest + 1} tokens where lines are long, this engine "
                f"verifies at most {self.most + 1}; use rule coupled, whose text depends on no line",
                "drafter",
            )
        if lack := _judged_in_lines_only(params):
            raise RequestError(
                f"drafter {drafter} has several lines, which {lack} cannot be used with; name one", "drafter"
            )

    def _require_sampler(self, drafter: str, lack: str) -> None:
        samplers = [name for name in self._listed if DRAFTERS[name].samples]
        if drafter not in (*samplers, NONE):
            raise RequestError(f"drafter {drafter} {lack}; use {' or '.join(samplers)}, or give a number")


def _look_aheads(names: Sequence[str]) -> int:
    """Return the most look-aheads that the target may read for these drafters, or for their neighbours' long lines."""
    return MAX_DRAFT_LENGTH if any(name in DRAFTERS and DRAFTERS[name].looks_ahead for name in names) else 0


def _parsed(length: object) -> Shape | EntropyRule | None:
    """Return what a draft length means; None if it is none, or auto."""
    if isinstance(length, Shape | EntropyRule):
        return length
    if type(length) is int:
        return line(length) if length >= 0 else None
    return read_shape(length) if isinstance(length, str) else None


def _judged_in_lines_only(params: SamplingParams) -> str | None:
    """Name a parameter that is known for single lines only, if one is set."""
    ahead = [one for one in FILTERS if one.reads_proposals and not one.reads_trees and one.active(params)]
    return " or ".join(ahead[0].fields) if ahead else None
