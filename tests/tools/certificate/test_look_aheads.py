"""A bundle with look-aheads is certified as any other, and faults of theirs fail it."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from trt_spec.runtime.drafters.look_aheads import Pass
from trt_spec.runtime.round import round as round_
from trt_spec.runtime.round.propose import propose
from trt_spec.runtime.state.look_aheads import LookAheads
from trt_spec.tools.certificate import distribution
from trt_spec.tools.certificate.first_tokens import Case
from trt_spec.tools.certificate.subject import several

from ...kit.bundles import Pair, export_pair
from ...kit.findings import findings
from ...kit.heads import look_aheads
from ...kit.models import tiny_llama


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A target of so few tokens that all first ones can be counted."""
    folder = tmp_path_factory.mktemp("ahead")
    target = tiny_llama(folder / "target", vocab=8, initializer_range=0.25)
    return export_pair(target, folder / "bundle", look_aheads(folder / "pass", target))


def by_another_place(rows: Any, plan: Any, *rest: Any) -> Any:
    """Each proposal is judged by the distribution of the place before it, as if that had drawn it."""
    proposal = propose(rows, plan, *rest)
    q = proposal.probabilities
    return proposal if q is None else proposal._replace(probabilities=q.roll(1, 1))


@pytest.mark.parametrize("faulty", [False, True])
def test_a_proposal_that_is_judged_by_the_distribution_of_another_place_is_seen_in_the_distribution(
    ahead: Pair, subject_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, faulty: bool
) -> None:
    every = distribution.list_cases

    def of_look_aheads(*of: Any) -> list[Case]:
        first = next(case for case in every(*of) if case.drafter == "pass" and case.rule == "rejection")
        return [replace(first, draft_length=2)]

    monkeypatch.setattr(distribution, "list_cases", of_look_aheads)
    with patch.object(round_, "propose", by_another_place) if faulty else nullcontext():
        found = next(findings("distribution", subject_of(ahead)))
    assert found.passed is not faulty, found.detail
    assert found.numbers["acceptance"], "the first round has none, the next two tokens are proposed"


def left_in_the_cache(self: Pass, rows: Any, frame: Any) -> None:
    """The entries of look-aheads stand where those of the tokens of their places belong."""
    keep(self, rows, frame)
    read, count = frame.input_ids.shape[1], frame.said_ahead.shape[1]
    places = torch.arange(count + 1)
    path = torch.where(places > 0, places + read - 1, 0).expand(frame.batch, -1)
    frame._caches[0].straighten(frame.position[1], path)


def seen_by_proposals(self: LookAheads) -> None:
    filled(self)
    self.ancestors[:, :, self._tokens.shape[1] :] = True


keep, filled = Pass.keep, LookAheads.fill
FAULTS = {"left in the cache": (Pass, "keep", left_in_the_cache), "seen": (LookAheads, "fill", seen_by_proposals)}


@pytest.mark.parametrize("name", [None, *FAULTS])
def test_look_aheads_leave_nothing_in_the_cache_or_it_is_seen(
    ahead: Pair, subject_of: Callable[..., Any], name: str | None
) -> None:
    subject = subject_of(ahead, batch=4)
    with patch.object(*FAULTS[name]) if name is not None else nullcontext():
        found = list(findings("rollback", subject))
    assert {one.case.partition(",")[0] for one in found} == {"target"}
    assert all(one.passed for one in found) == (name is None), [one.detail for one in found]


def test_the_certificate_asks_for_no_more_lines_than_look_aheads_leave_room_for(
    ahead: Pair, subject_of: Callable[..., Any]
) -> None:
    with subject_of(ahead).open() as decoder:
        assert any("pass" in drafter for drafter, _ in several(decoder))
        for drafter, length in several(decoder):
            decoder.submit([3], drafter=drafter, draft_length=length)


@pytest.mark.exhaustive
@pytest.mark.parametrize("check", ["same text", "semantics", "distribution"])
def test_a_bundle_with_look_aheads_is_certified(ahead: Pair, subject_of: Callable[..., Any], check: str) -> None:
    failed = [one for one in findings(check, subject_of(ahead, batch=4)) if one.passed is False]
    assert not failed, [(one.case, one.detail) for one in failed]
