"""Each planted fault makes the certificate fail, in the check that is there for it."""

from math import sqrt

import pytest
from trt_spec.runtime.acceptance import accept as acceptance
from trt_spec.runtime.state.asked import BESIDE
from trt_spec.runtime.state.shapes import Shape
from trt_spec.tools.certificate import distribution
from trt_spec.tools.certificate.effort import FULL, QUICK
from trt_spec.tools.certificate.faults import SWAPS as CONTROLS
from trt_spec.tools.certificate.first_tokens import Case
from trt_spec.tools.certificate.recalled import RecallingDecoder
from trt_spec.tools.certificate.subject import Finding, is_tree

from ...kit.bundles import Pair
from ...kit.faults import SWAPS, fault
from ...kit.findings import findings

LEAST = 0.02  # total variation of a fault of the distribution
FEW = 0.1  # the total variation that so few samples catch that the tests are quick
FEWER = dict.fromkeys(
    ("block test without its denominator", "q of lines declared flat"), 0.05
)  # where a fault moves less
CAUGHT_BY = {
    "wrongly declared q": "distribution",
    "filter on one side only": "distribution",
    "skipped residual": "distribution",
    "residual of another q": "distribution",
    "block ended by its first failure": "distribution",
    "block test without its denominator": "distribution",
    "one end for all blocks": "distribution",
    "greedy draft declared sampled": "distribution",
    "penalties over the context before the round": "distribution",
    "prediction judged by the noise that made it": "distribution",
    "one length for all rows": "same text",
    "noise of the first row in all rows": "same text",
    "hole after full acceptance": "rollback",
    "cache left behind when a row moves": "rollback",
    "end of text kept inside an accepted run": "semantics",
    "log-probabilities of the row before": "semantics",
    "children chosen, not drawn": "distribution",
    "q of a branch taken from the root": "distribution",
    "q of a sibling not renormalised": "distribution",
    "residual of the line after its siblings": "distribution",
    "noise of nodes, not of indices": "same text",
    "sibling seen by a sibling": "same text",
    "positions by column": "same text",
    "cache entries of all rows moved as the first row's": "rollback",
    "cache entry of a sibling left where it is": "rollback",
    "hole after a sibling": "rollback",
    "line seen by another": "same text",
    "q of lines declared flat": "distribution",
    "hole after another line": "rollback",
    "log-probabilities along the line": "semantics",
}
IN_DEFAULT_TIER = (  # beside all that a quick certificate fails for
    "wrongly declared q",
    "skipped residual",
    "greedy draft declared sampled",
    "prediction judged by the noise that made it",
    "children chosen, not drawn",
    "q of lines declared flat",
)
OF_GRAPHS = ("sibling seen by a sibling", "line seen by another", "positions by column")  # seen in the cache, too


def of_a_tree(case: Case) -> bool:
    return is_tree(case.drafter, case.draft_length)


def of_what_has_grown(case: Case) -> bool:
    return isinstance(case.draft_length, Shape) and not case.draft_length.leaves


def of_several_lines(case: Case) -> bool:
    return BESIDE in case.drafter and case.rule == "tokenwise"


def of_a_prediction(case: Case) -> bool:
    return case.predicted


def of_seeds(finding: Finding) -> bool:
    """What χ² must see as well is often seen by what seeds say, before (test_seeded.py)."""
    return finding.check == "distribution" and "bugs" in finding.numbers


SHOWN_BY = {  # the cases of single lines, sampled before, cannot show it
    "prediction judged by the noise that made it": of_a_prediction,
    "children chosen, not drawn": of_a_tree,
    "q of a branch taken from the root": of_what_has_grown,
    "q of a sibling not renormalised": of_a_tree,
    "residual of the line after its siblings": of_a_tree,
    "q of lines declared flat": of_several_lines,
}


def test_every_fault_has_a_check():
    assert CAUGHT_BY.keys() == SWAPS.keys()
    assert len(CAUGHT_BY) >= 10


@pytest.mark.parametrize(
    "name",
    [name if name in IN_DEFAULT_TIER else pytest.param(name, marks=pytest.mark.exhaustive) for name in CAUGHT_BY],
)
def test_the_certificate_fails_for_the_fault(
    eight: Pair, llama: Pair, subject_of, name: str, monkeypatch: pytest.MonkeyPatch
):
    check = CAUGHT_BY[name]
    if shown_by := SHOWN_BY.get(name):
        every = distribution.list_cases
        monkeypatch.setattr(distribution, "list_cases", lambda *of: list(filter(shown_by, every(*of))))
    subject = subject_of(eight if check == "distribution" else llama)
    with fault(name):
        found = findings(check, subject, FULL.catching(FEWER.get(name, FEW)))
        failed = next((finding for finding in found if finding.passed is False and not of_seeds(finding)), None)
    assert failed is not None, f"{check} has not seen it"
    assert failed.check == check
    if check == "distribution":
        numbers = failed.numbers
        by_chance = 0.4 * sqrt(numbers["cells"] / numbers["samples"])
        assert numbers["total_variation_seen"] - by_chance >= LEAST
        assert not failed.case.startswith("planted"), "it is a case itself that fails"
    print(f"{name}: {failed.case}: {failed.detail}")


@pytest.mark.parametrize(
    "name",
    [
        "children chosen, not drawn",
        *(
            pytest.param(name, marks=pytest.mark.exhaustive)
            for name in ("skipped residual", "q of lines declared flat")
        ),
    ],
)
def test_it_fails_where_its_target_recalls_too(eight: Pair, subject_of, name: str, monkeypatch: pytest.MonkeyPatch):
    every, shown_by = distribution.list_cases, SHOWN_BY.get(name, of_a_tree)
    monkeypatch.setattr(distribution, "list_cases", lambda *of: list(filter(shown_by, every(*of))))
    with fault(name):
        found = findings("distribution", subject_of(eight, decoder=RecallingDecoder), FULL.catching(FEW))
        failed = next(finding for finding in found if finding.passed is False and not of_seeds(finding))
    assert failed.detail.endswith(", recalled")


@pytest.mark.parametrize("name", [name for name, check in CAUGHT_BY.items() if check != "distribution"])
def test_a_quick_certificate_fails_for_it_too(llama: Pair, subject_of, name: str):
    """Of the distribution it promises less, of the others nothing but that it tries less."""
    with fault(name):
        assert any(finding.passed is False for finding in findings(CAUGHT_BY[name], subject_of(llama), QUICK))


@pytest.mark.parametrize("name", OF_GRAPHS)
def test_what_the_graph_is_told_wrongly_of_a_tree_is_seen_in_the_cache_too(llama: Pair, subject_of, name: str):
    with fault(name):
        assert any(finding.passed is False for finding in findings("rollback", subject_of(llama), QUICK))


def test_a_fault_is_gone_when_its_block_ends():
    before = acceptance.residual
    with pytest.raises(ZeroDivisionError), fault("skipped residual"):
        _ = 1 / (acceptance.residual is before)
    assert acceptance.residual is before


def test_a_fault_is_planted_where_tokens_are_drawn_too():
    """Of a bundle without a draft model the first case is one of copies, which a short prompt hardly has."""
    cases = [
        (Case("T 0.5", "rejection", drafter, 2, (1,)), None)
        for drafter in ("lookup", "suffix", "lookup+eagle3", "eagle3", "medusa")
    ]
    assert [case.drafter for case, _ in distribution.tries(cases)] == ["lookup", "eagle3"]
    assert [case.drafter for case, _ in distribution.tries(cases[3:])] == ["eagle3"]
    assert [case.drafter for case, _ in distribution.tries(cases[:2])] == ["lookup"]


@pytest.mark.exhaustive
def test_a_control_that_is_not_caught_fails(eight: Pair, subject_of, monkeypatch: pytest.MonkeyPatch):
    """A planted fault that does nothing stands for a check that sees nothing."""
    monkeypatch.setitem(CONTROLS, "skipped residual", ())
    found = findings("distribution", subject_of(eight), QUICK)
    [control] = [finding for finding in found if finding.case == "planted: skipped residual"]
    assert control.passed is False
    assert control.numbers["caught"] is False


@pytest.mark.exhaustive
def test_a_control_that_can_do_no_harm_is_said_to(twin: Pair, subject_of):
    """Where the draft is the target nothing is rejected, by half of its q neither: no residual is ever drawn from."""
    unjudged = [finding for finding in findings("distribution", subject_of(twin), QUICK) if not finding.passed]
    assert [(one.case, one.passed) for one in unjudged] == [
        ("planted: wrongly declared q", None),
        ("planted: skipped residual", None),
    ]
    assert unjudged[0].detail == "no proposal was ever rejected, so that it changes nothing"
