"""The figures that the README quotes come from one run, by bench's own measuring."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
from trt_spec.tools.making.growing import LlamaSize
from trt_spec.tools.research import figures

pytestmark = pytest.mark.research


def test_each_figure_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--work", str(tmp_path / "work"), "--repeats", "1", "--json", str(tmp_path / "out.json")]
    with (
        patch.object(figures, "GROWN", LlamaSize(384, 8, 6, 2, 1024)),
        patch.object(figures, "COMPARED", {"model": ("2", "assisted"), "lookup": ("2", "prompt lookup")}),
    ):
        assert figures.main(command) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads((tmp_path / "out.json").read_text())
    memory = found["memory_mb"]
    assert 0 < memory["imported"] < memory["open"] < memory["after 300 requests"]
    cases = [f"capacity {capacity} batch {batch}" for capacity in (512, 8192) for batch in (1, 4)]
    assert list(found["round_ms_over_capacity"]) == cases
    assert set(found["tokens_per_second"]) == {
        *("plain", "transformers generate"),
        *("model K=2", "transformers assisted K=2"),
        *("lookup K=2", "transformers prompt lookup K=2"),
    }
    assert min(found["round_ms_over_capacity"].values()) > 0 < min(found["tokens_per_second"].values())


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_made(tmp_path: Path, capsys) -> None:
    missing = tmp_path / "missing" / "out.json"
    assert figures.main(["--work", str(tmp_path / "work"), "--json", str(missing)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"figures: error: output {missing} cannot be written")
    assert not (tmp_path / "work").exists()
