"""Faults of one place each, and the file nearest to it, whose tests of the default tier must fail alone.

python -m tests.kit.nearest              all of them
python -m tests.kit.nearest "FAULT" …    some; says which test has seen each
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import torch
from trt_spec.engines import Recurrence, Step
from trt_spec.runtime.beams import tail
from trt_spec.runtime.drafters import masked
from trt_spec.runtime.drafters.foreign_draft import ForeignDraft, Steps
from trt_spec.runtime.drafters.head import OnePass, States
from trt_spec.runtime.drafters.look_aheads import COUNT, Pass
from trt_spec.runtime.memory.features import Features
from trt_spec.runtime.memory.row_cache import RowCache
from trt_spec.runtime.state.look_aheads import LookAheads
from trt_spec.runtime.translation.translation import Translation
from trt_spec.tools.certificate.faults import planted

from . import bundles
from .faults import SWAPS

HEADS, RECURRENT = "tests/runtime/drafters/test_heads.py", "tests/runtime/test_recurrent.py"
STATES, AHEAD = "tests/runtime/memory/test_states.py", "tests/runtime/drafters/test_look_aheads.py"
BEAMS, FOREIGN = "tests/runtime/beams/test_beams.py", "tests/runtime/drafters/test_foreign.py"
SHAPES = "tests/runtime/test_shapes.py"


class Fault(NamedTuple):
    owner: Any
    name: str
    make: Callable[[Any], Any]  # of what is there, what is there instead
    file: str


def early(into: Any) -> Any:
    return lambda self, given, first_row, start: into(self, given, first_row, start - 1)


def next_place(filling: Any) -> Any:
    def faulty(masks: Any, most: int, tokens: Any, last: Any, ids: Any, rows: Any) -> Any:
        fill = filling(masks, most, tokens, last, ids, rows)
        return lambda: (fill(), rows.add_(1).clamp_(max=ids.shape[1] - 1))

    return faulty


def root_of_the_first(hand_on: Any) -> Any:
    def faulty(self: States, nodes: Any, made: Any) -> None:
        hand_on(self, nodes, made)
        self.given[:, 0] = self._root[:, 0]

    return faulty


def one_before(before: Any) -> Any:
    return lambda i, *of: before(max(0, i - 1), *of)


def rolled(said: Any) -> Any:
    return lambda self, step, logits, *of: said(self, step, logits.roll(1, 1), *of)


def telling(change: Callable[[Recurrence, dict[str, Any]], Any]) -> Any:
    """The graph is told something else of its states than what the round knows."""

    def make(begin: Any) -> Any:
        def faulty(self: Recurrence, step: Step, first: int = 0) -> Step:
            return begin(self, replace(step, run=lambda: (change(self, step.inputs), step.run())), first)

        return faulty

    return make


def last_not_absorbed(_: Recurrence, inputs: dict[str, Any]) -> None:
    inputs["fold"].sub_(1).clamp_(min=0)


def other_half(self: Recurrence, inputs: dict[str, Any]) -> None:
    inputs["pending"].add_(self.half).remainder_(2 * self.half)


def written_one_before(_: Recurrence, inputs: dict[str, Any]) -> None:
    inputs["slot"].sub_(1).clamp_(min=0)


def nothing(_: Any) -> Any:
    return lambda *_: None


def changed(change: Callable[[LookAheads, int], Any]) -> Any:
    def make(init: Any) -> Any:
        def faulty(self: LookAheads, tokens: Any, *others: Any) -> None:
            init(self, tokens, *others)
            change(self, tokens.shape[1])

        return faulty

    return make


def one_place_further(ahead: LookAheads, width: int) -> None:
    ahead.depths[:, width:] += 1


def proposals_are_seen(ahead: LookAheads, width: int) -> None:
    ahead.ancestors[:, width:, 1:width] = True


def one_too_many(keep: Any) -> Any:
    def faulty(self: Pass, rows: Any, frame: Any) -> None:
        keep(self, rows, frame)
        rows.columns[COUNT].add_(1).clamp_(max=self._most)

    return faulty


def one_deeper(told: Any) -> Any:
    return lambda depths, ancestors: told(depths + 1, ancestors)


def siblings_are_seen(told: Any) -> Any:
    def faulty(depths: Any, ancestors: Any) -> Any:
        own = torch.ones_like(ancestors).tril(ancestors.shape[2] - ancestors.shape[1])
        return told(depths, ancestors | own)

    return faulty


def other_numbers(run: Any) -> Any:
    def faulty(self: Steps, i: int, tokens: Any = None) -> Any:
        return run(self, i, None if tokens is None else (tokens + 1) % self.logits.shape[2])

    return faulty


def last_one_early(read: Any) -> Any:
    def faulty(self: ForeignDraft, *asked: Any) -> Any:
        found = read(self, *asked)
        self._last.sub_(1).clamp_(min=0)
        return found

    return faulty


def steps_one_late(read: Any) -> Any:
    def faulty(self: ForeignDraft, *asked: Any) -> Any:
        steps, able = read(self, *asked)
        steps.start.add_(1)
        return steps, able

    return faulty


def of_shapes(name: str) -> Fault:
    """One that the certificate's tests plant, too."""
    [(owner, attribute, faulty)] = SWAPS[name]
    return Fault(owner, attribute, lambda _: faulty, SHAPES)


def other_ids(read: Any) -> Any:
    def faulty(*given: Any) -> Any:
        found = read(*given)
        return replace(found, target_ids=found.target_ids.roll(1))

    return faulty


FAULTS = {
    "features an entry early": Fault(Features, "into", early, HEADS),
    "a block's distribution of the next place": Fault(masked, "filling", next_place, HEADS),
    "the root's state of an earlier token": Fault(States, "hand_on", root_of_the_first, HEADS),
    "a block's token behind the one before the last": Fault(masked, "before", one_before, HEADS),
    "heads that say each other's places": Fault(OnePass, "said", rolled, HEADS),
    "a token not absorbed": Fault(Recurrence, "begin", telling(last_not_absorbed), RECURRENT),
    "tokens of the other half absorbed": Fault(Recurrence, "begin", telling(other_half), RECURRENT),
    "proposals written over each other": Fault(Recurrence, "go_on", telling(written_one_before), RECURRENT),
    "states stand elsewhere when rows change places": Fault(Recurrence, "swap", nothing, STATES),
    "look-aheads one position further": Fault(LookAheads, "__init__", changed(one_place_further), AHEAD),
    "look-aheads see proposals": Fault(LookAheads, "__init__", changed(proposals_are_seen), AHEAD),
    "look-aheads forgotten with a place": Fault(Pass, "gave_up", nothing, AHEAD),
    "a look-ahead that was not read": Fault(Pass, "keep", one_too_many, AHEAD),
    "a tail one position deeper": Fault(tail, "BranchedCall", one_deeper, BEAMS),
    "a tail's tokens see their siblings": Fault(tail, "BranchedCall", siblings_are_seen, BEAMS),
    "a tail's entries left where they are": Fault(RowCache, "reorder", nothing, BEAMS),
    "what common said read as another token": Fault(Steps, "run", other_numbers, FOREIGN),
    "common asked behind the last token but one": Fault(ForeignDraft, "read", last_one_early, FOREIGN),
    "what common said written an entry late": Fault(ForeignDraft, "read", steps_one_late, FOREIGN),
    "common's distribution laid on other tokens": Fault(Translation, "read", other_ids, FOREIGN),
    **{
        name: of_shapes(name)
        for name in (
            "one length for all rows",
            "noise of nodes, not of indices",
            "sibling seen by a sibling",
            "line seen by another",
            "positions by column",
            "cache entry of a sibling left where it is",
        )
    },
}


class Planting:
    """A plugin of pytest: the fault is there once all tests are collected."""

    def __init__(self, fault: Fault, exports: Path) -> None:
        self._fault, self._exports, self._planted = fault, exports, ExitStack()
        self.file, self.seen_by = fault.file, ""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        found = yield
        if fixturedef.argname == "exports":  # of all faults together
            bundles.exports = self._exports
        return found

    def pytest_collection_finish(self) -> None:
        owner, name, make, _ = self._fault
        self._planted.enter_context(planted((owner, name, make(getattr(owner, name)))))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.seen_by:
            self.seen_by = report.nodeid.rpartition("::")[2]

    def pytest_unconfigure(self) -> None:
        self._planted.close()


def main(names: list[str]) -> int:
    missed = 0
    with TemporaryDirectory() as exports:
        for name in names or FAULTS:
            plugin = Planting(FAULTS[name], Path(exports))
            pytest.main([plugin.file, "-x", "-q", "--no-header", "--no-summary", "--show-capture=no"], plugins=[plugin])
            print(f"{name} | {plugin.file} | {plugin.seen_by or 'NOBODY HAS SEEN IT'}", flush=True)
            missed += not plugin.seen_by
    return missed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
