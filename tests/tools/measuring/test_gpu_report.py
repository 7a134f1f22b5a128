"""The report that needs a GPU to be of interest runs on the CPU as well, so that it is ready for one."""

import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
from trt_spec.tools.making.growing import LlamaSize
from trt_spec.tools.measuring import gpu_report

from ...bundles import Pair


@pytest.mark.exhaustive
@pytest.mark.long
def test_the_report_measures_what_it_says(demo: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(demo.bundle, tmp_path / "work" / "demo-float32")  # what was exported before is not made again
    command = ["--work", str(tmp_path / "work"), "--device", "cpu", "--shapes", "0.1B"]
    command += ["--new-tokens", "12", "--json", str(tmp_path / "out.json")]
    with (
        patch.dict(gpu_report.SHAPES, {"0.1B": (LlamaSize(384, 8, 6, 2, 1024), None)}),
        patch.dict(gpu_report.MODES, {"eager": ("torch", False)}, clear=True),
        patch.object(gpu_report, "BATCHES", (2,)),
        patch.object(gpu_report, "DRAFT_LENGTHS", (0, 2)),
        patch.object(gpu_report, "TREES", ("2/4",)),
    ):
        assert gpu_report.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found == json.loads((tmp_path / "out.json").read_text())
    parity = {(one["engine"], one["dtype"]): one for one in found["parity"]}
    assert set(parity) == {("torch", dtype) for dtype in gpu_report.DTYPES} | {("onnxruntime", "float32")}
    assert parity["torch", "float32"]["logit_error"] < 1e-5 < parity["torch", "bfloat16"]["logit_error"] < 0.05
    assert parity["torch", "float32"]["same_text"] == "6 of 6"
    assert found["coupled"]["passed"]
    assert found["coupled"]["numbers"]["outputs"] == 6
    assert found["failed"] == {}
    settings = [(one["batch"], one["temperature"], one["draft_length"]) for one in found["speed"]]
    assert settings == [(b, t, k) for b in (2,) for t in (0.0, 1.0) for k in (0, 2, "2/4")]
    for one in found["speed"]:
        assert one["tokens_per_second"] > 0
        assert 0.8 < one["over_kernels"] < 3
        assert (one["roof_share"] is None) == (one["draft_length"] != 0)
        assert (one["of_theory"] is None) == (one["draft_length"] != 2)
    assert set(found["transformers 0.1B"]) == {"generate", "assisted"}
    assert any(line.split()[:2] == ["pair", "mode"] for line in lines)


def test_a_part_that_fails_stops_no_other_and_says_why(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with (
        patch.object(gpu_report, "parity", side_effect=MemoryError("none\nleft")),
        patch.object(gpu_report, "coupled_ties", return_value={"passed": True}),
        patch.object(gpu_report, "read_bandwidth", return_value=1.0),
    ):
        found = gpu_report.report(tmp_path / "work", "cpu", [], 4, out)
    assert found["failed"] == {"parity": "MemoryError: none"}
    assert found["coupled"] == {"passed": True}
    assert json.loads(out.read_text()) == found


def test_a_device_that_is_not_here_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_report.main(["--work", str(tmp_path / "work"), "--device", "cuda:77"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu_report: error: --device is 'cuda:77'")
