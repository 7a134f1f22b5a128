"""The report that needs a GPU to be of interest runs on the CPU as well, so that it is ready for one."""

import json
import shutil
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from trt_spec.tools.making.growing import LlamaSize
from trt_spec.tools.measuring import gpu_parts, gpu_report
from trt_spec.tools.measuring.budget import Part, Row, run_parts
from trt_spec.tools.measuring.gpu_parts import Speed

from ...kit.bundles import Pair

ONE = (Speed("captured", 2, 0.0, "0,2,2/4", 0),)


@pytest.fixture
def work(unequal: Pair, tmp_path: Path) -> Path:
    """A pair that need not be grown."""
    folder = tmp_path / "work" / "grown-1B"
    shutil.copytree(unequal.bundle, folder / "bundle")
    shutil.copytree(unequal.checkpoint, folder / "target")
    shutil.copytree(unequal.bundle.parent / "draft", folder / "draft")
    return folder.parent


@pytest.mark.exhaustive
def test_a_report_prints_each_row_when_it_is_known_and_ends_beside_the_kept_figures(
    work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = {"engine": "torch", "dtype": "float32", "logit_error": 0.0, "same_text": "6 of 6"}
    command = ["--work", str(work), "--device", "cpu", "--shapes", "1B", "--new-tokens", "12", "--minutes", "60"]
    with (
        patch.object(gpu_report, "FIRST", (Speed("captured", 1, 0.0, "0,2,2/4", 0),)),
        patch.object(gpu_report, "FURTHER", ()),
        patch.object(gpu_report, "parity", lambda *_: iter([one])),
        patch.object(gpu_report, "coupled_ties", lambda *_: iter([{"passed": True}])),
    ):
        assert gpu_report.main([*command, "--json", str(work / "out.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert found == json.loads((work / "out.json").read_text())
    assert (found["failed"], found["left_out"]) == ({}, {})
    told = [line.partition(":")[0] for line in lines]
    begun = [told.index(name) for name in ("bandwidth", "grown 1B", "speed 1B, captured, batch 1, T 0")]
    assert begun == sorted(begun)
    speed = found["rows"]["speed"]
    rows = [(one["mode"], one["batch"], one["draft_length"]) for one in speed]
    assert rows == [*(("captured", 1, k) for k in (0, 2, "2/4")), *(("transformers", 1, k) for k in (0, 4))]
    assert all(one["tokens_per_second"] > 0 for one in speed)
    for one in speed:
        fixed = one["mode"] == "captured" and one["draft_length"] != "2/4"
        assert (one.get("predicted_ms") is not None) == fixed
    table = [line.split() for line in lines]
    plain = next(row for row in table if row[:5] == ["1B", "captured", "1", "0.0", "0"])
    assert plain[6] == "584", "of the kept figures"
    assert float(plain[7]) == pytest.approx(speed[0]["tokens_per_second"] / 584, abs=0.006)


def test_what_does_not_fit_is_left_out_and_named(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a shape that would have to be grown first."""
    with patch.object(gpu_report, "bandwidth", lambda device: iter([{"bytes_per_second": 1.0}])):
        command = ["--work", str(work), "--device", "cpu", "--shapes", "8B", "--minutes", "0.1"]
        assert gpu_report.main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    found = json.loads(lines[-1])
    assert list(found["rows"]) == ["bandwidth"]
    assert "it takes 150 s, and" in found["left_out"]["grown 8B"]
    assert {f"left out: {name}: {why}" for name, why in found["left_out"].items()} < set(lines)
    assert not (work / "grown-8B").exists()


def test_a_part_that_goes_on_is_ended_and_its_rows_stay() -> None:
    def endless() -> Iterator[Row]:
        for number in count():
            yield {"number": number}

    rows: list[Row] = []
    parts = [Part("endless", 0, endless), Part("later", 0.01, endless)]
    done = list(run_parts(parts, 1.0, lambda part, row: rows.append(row), lambda: None))
    assert [(part.name, one.left_out is not None, one.failed) for part, one in done] == [
        ("endless", True, None),
        ("later", True, None),
    ]
    assert rows[:2] == [{"number": 0}, {"number": 1}]


def test_nothing_takes_the_end_of_the_time_for_an_error() -> None:
    def stubborn() -> Iterator[Row]:
        while True:
            with suppress(Exception):
                yield {}

    [(_, done)] = run_parts([Part("stubborn", 0, stubborn)], 0.1, lambda part, row: None, lambda: None)
    assert done.left_out == "the time was over before it had ended"


def test_a_part_that_fails_stops_no_other_and_says_why(work: Path) -> None:
    def failing(*_: object) -> Iterator[Row]:
        yield {"dtype": "float32"}
        raise MemoryError("none\nleft")

    with (
        patch.object(gpu_report, "parity", failing),
        patch.object(gpu_report, "coupled_ties", lambda *_: iter([{"passed": True}])),
        patch.object(gpu_report, "bandwidth", lambda device: iter([{"bytes_per_second": 1.0}])),
    ):
        found = gpu_report.report(work, "cpu", [], 4, 60, work / "out.json")
    assert found["failed"] == dict.fromkeys(
        ["parity torch float16", "parity torch bfloat16", "parity onnxruntime float32"], "MemoryError: none"
    )
    assert found["rows"]["coupled"] == [{"passed": True}]
    assert json.loads((work / "out.json").read_text()) == found


@pytest.mark.exhaustive
@pytest.mark.long
def test_the_report_measures_what_it_says(demo: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(demo.bundle, tmp_path / "work" / "demo-float32")  # what was exported before is not made again
    command = ["--work", str(tmp_path / "work"), "--device", "cpu", "--shapes", "0.1B", "--minutes", "60"]
    with (
        patch.dict(gpu_parts.SHAPES, {"0.1B": (LlamaSize(384, 8, 6, 2, 1024), None)}),
        patch.object(gpu_report, "FIRST", ONE),
        patch.object(gpu_report, "FURTHER", ()),
    ):
        assert gpu_report.main([*command, "--new-tokens", "12"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["failed"], found["left_out"]) == ({}, {})
    parity = {(one["engine"], one["dtype"]): one for one in found["rows"]["parity"]}
    assert set(parity) == {("torch", dtype) for dtype in gpu_parts.DTYPES} | {("onnxruntime", "float32")}
    assert parity["torch", "float32"]["logit_error"] < 1e-5 < parity["torch", "bfloat16"]["logit_error"] < 0.05
    assert parity["torch", "float32"]["same_text"] == "6 of 6"
    [coupled] = found["rows"]["coupled"]
    assert coupled["passed"]
    assert coupled["numbers"]["outputs"] == 6
    for one in found["rows"]["speed"]:
        assert one["tokens_per_second"] > 0
        if one["mode"] == "captured":
            assert 0.8 < one["over_kernels"] < 3
            assert (one["roof_share"] is None) == (one["draft_length"] != 0)
            assert (one["of_theory"] is None) == (one["draft_length"] != 2)


def test_a_second_start_of_compiled_steps_is_told_beside_the_first(llama: Pair) -> None:
    """With the operations of a region in place of its code, which torch would find the second time."""
    forms = set()

    def compiled(module: Any, read: list[Tensor], **_: Any) -> Any:
        form = module.code, *(one.shape for one in read)
        counters["inductor"]["fxgraph_cache_hit" if form in forms else "fxgraph_cache_miss"] += 1
        forms.add(form)
        return module

    with patch.object(torch._inductor, "standalone_compile", compiled):
        first, second = gpu_parts.compiled_starts("tiny", llama.bundle, "cpu")
    assert (first["start"], second["start"]) == ("first", "second")
    assert first["compiled"] == second["found"] > 0
    assert first["found"] == second["compiled"] == 0
    assert min(first["seconds"], second["seconds"]) > 0


@pytest.mark.parametrize("wrong", ["0", "-1", "soon", "nan"])
def test_minutes_that_are_none_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str) -> None:
    with pytest.raises(SystemExit):
        gpu_report.main(["--work", str(tmp_path), "--minutes", wrong])
    assert f"'{wrong}', expected a number of minutes up to 1440" in capsys.readouterr().err


def test_a_device_that_is_not_here_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_report.main(["--work", str(tmp_path / "work"), "--device", "cuda:77"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("gpu_report: error: --device is 'cuda:77'")
