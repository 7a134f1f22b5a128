"""A bundle with an encoder is certified as others are, and faults of sources make it fail."""

from collections.abc import Callable
from pathlib import Path

import pytest
from trt_spec.engines import Bundle
from trt_spec.runtime.memory.source_rows import SourceRows
from trt_spec.tools.certificate import checkpoint, distribution, rollback, same_text, semantics
from trt_spec.tools.certificate.effort import QUICK
from trt_spec.tools.certificate.probe import Probes
from trt_spec.tools.certificate.subject import Finding, Subject

from ...kit.bundles import export_pair
from ...kit.source_models import noisy_copy, tiny_with_source


@pytest.fixture(scope="module", params=["t5", "whisper"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    target = tiny_with_source(request.param, folder / "target")
    draft = noisy_copy(request.param, target, folder / "draft", 0.1, encoder=False)
    export_pair(target, folder / "bundle", draft)
    return folder


def certified(folder: Path, check: Callable) -> list[Finding]:
    subject = Subject(Bundle.open(folder / "bundle"), "onnxruntime", "cpu", 8)
    with Probes(subject) as probes:
        if check is checkpoint.check:
            return [*check(subject, folder / "target", probes, QUICK, lambda *_: None)]
        return [*check(subject, probes, QUICK, lambda *_: None)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "check", [checkpoint.check, same_text.check, semantics.check, rollback.check, distribution.check]
)
def test_a_bundle_with_an_encoder_passes(folder: Path, check: Callable) -> None:
    findings = certified(folder, check)
    assert findings
    assert all(one.passed is not False for one in findings), [one for one in findings if one.passed is False]


def stays(self: SourceRows, source: int, destination: int) -> None:
    """The row that moves leaves its source behind."""
    self._note(destination, self.entries[source])
    self._note(source, 0)


def trades_nothing(self: SourceRows, one: int, other: int) -> None:
    """Two rows change places, their sources do not."""
    ours, theirs = self.entries[one], self.entries[other]
    self._note(one, theirs)
    self._note(other, ours)


def one_length_for_all(self: SourceRows, row: int, entries: int) -> None:
    """Rows read all that the memory holds, whatever their sources were."""
    self.entries[row] = entries
    self._length[row] = self.capacity if entries else 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("folder", ["t5"], indirect=True)
@pytest.mark.parametrize(("name", "fault"), [("move", stays), ("swap", trades_nothing), ("_note", one_length_for_all)])
def test_a_fault_of_sources_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable) -> None:
    monkeypatch.setattr(SourceRows, name, fault)
    findings = [*certified(folder, same_text.check), *certified(folder, rollback.check)]
    assert any(one.passed is False for one in findings)
