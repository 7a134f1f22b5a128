"""A bundle with recurrent layers is certified as any other, and by what its states absorb."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from trt_spec.engines import Bundle
from trt_spec.tools.certificate import rollback
from trt_spec.tools.certificate.effort import QUICK
from trt_spec.tools.certificate.probe import Probes
from trt_spec.tools.certificate.state_faults import STATE_FAULTS, state_fault
from trt_spec.tools.certificate.subject import Finding, Subject

from ...kit.hybrids import LAYERS, Hybrid

CERTIFIED = ("granitemoehybrid", "qwen3_5_text")  # in each run; the others by hand


def found(bundle: Path, batch: int = 4) -> Iterator[Finding]:
    subject = Subject(Bundle.open(bundle), "onnxruntime", "cpu", batch)
    with Probes(subject) as probes:
        yield from rollback.check(subject, probes, QUICK, lambda *_: None)


@pytest.mark.parametrize(
    "family", [one if one == "granitemoehybrid" else pytest.param(one, marks=pytest.mark.exhaustive) for one in LAYERS]
)
def test_after_rounds_of_all_kinds_a_row_holds_what_a_fresh_reading_gives(
    hybrids: Callable[[str], Hybrid], family: str
) -> None:
    """Target and draft, also of rows that have moved, and each planted fault is seen."""
    findings = list(found(hybrids(family).bundle))
    models = [f"{role}, batch {batch}" for batch in (1, 4) for role in ("target", "draft")]
    assert [one.case for one in findings] == [*models, *(f"planted: {name}" for name in STATE_FAULTS)]
    assert all(one.passed for one in findings), [one.detail for one in findings]


def test_a_fault_that_is_not_caught_fails_and_one_without_occasion_is_not_judged(
    hybrids: Callable[[str], Hybrid], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault that does nothing stands for a check that sees nothing."""

    def harmless(function: Any, note: Callable[[str], None]) -> Any:
        note("said to change something")
        return function

    missed = "token that fell absorbed"
    monkeypatch.setitem(STATE_FAULTS, missed, (*STATE_FAULTS[missed][:2], harmless))
    findings = {one.case: one for one in found(hybrids("lfm2").bundle, batch=1)}
    assert findings[f"planted: {missed}"].passed is False
    for name in ("padding absorbed", "states left behind when a row moves"):
        alone = findings[f"planted: {name}"]
        assert (alone.passed, alone.detail) == (None, "it never had anything to change"), "in a single row"


@pytest.mark.parametrize(
    "family",
    [pytest.param(one, marks=pytest.mark.exhaustive if one in CERTIFIED else pytest.mark.families) for one in LAYERS],
)
def test_a_sound_bundle_is_certified_and_none_with_a_fault(
    run: Callable[..., Any], hybrids: Callable[[str], Hybrid], family: str
) -> None:
    bundle = hybrids(family).bundle
    sound = run("verify", bundle, "--quick", "--batch", 16)
    assert sound.code == 0, sound.out
    assert "all " in sound.out.splitlines()[-1]
    for name in STATE_FAULTS:
        with state_fault(name):
            assert any(one.passed is False for one in found(bundle)), name
