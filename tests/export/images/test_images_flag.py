"""`export-models --images` says what it does and what it has written."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from trt_spec.engines import Bundle
from trt_spec.tools.cli import main as trt_spec
from trt_spec.tools.commands import export_models

from ...kit.seeing_models import seeing


def test_it_counts_its_stages_and_lists_the_vision_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    seeing("llava", tmp_path / "whole")
    shown: list[str] = []

    @contextmanager
    def progress(name: str, total: int, ticking: bool) -> Iterator[Callable[[str], None]]:
        yield shown.append
        assert len(shown) == total, shown

    bundle = tmp_path / "bundle"
    with patch.object(export_models, "progress", progress):
        arguments = ["--target", str(tmp_path / "whole"), "--out", str(bundle), "--images", "--weights", "int8"]
        assert export_models.main(arguments) == 0
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("vision")]
    vision = Bundle.open(bundle).vision
    assert vision is not None
    assert f"{vision.parameters:,}" in line
    assert "int8" in line
    assert trt_spec(["inspect", str(bundle)]) == 0
    said = capsys.readouterr().out
    assert f"vision: of whole, reads images for the target; {vision.parameters:,} parameters" in said
    assert "past_images float32[entries, 32]" in said
