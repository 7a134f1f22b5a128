"""TensorRT plans of latent attention, whose keys and values are one tensor: compiled for RTX."""

from pathlib import Path

import pytest
from trt_spec.engines import Bundle
from trt_spec.engines.tensorrt import PlanKey
from trt_spec.export import export_bundle
from trt_spec.export.plans.compiler import Compiler

from ...kit.families import tiny_checkpoint


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "width", "rows", "batch"), [("deepseek_v3", 5, 5, 4), ("minicpm3", 32, 1, 1)])
def test_plans_of_latents_compile(tmp_path: Path, kind: str, width: int, rows: int, batch: int) -> None:
    """MiniCPM3's residual factor was rounded in half precision, as its check would tell."""
    export_bundle(tiny_checkpoint(kind, tmp_path / "checkpoint"), tmp_path / "bundle", dtype="float16")
    bundle = Bundle.open(tmp_path / "bundle")
    sizes = (width, rows, (1, batch), bundle.capacity)
    key = PlanKey("target", "any", "tensorrt-rtx", "any", "8.9", *sizes, unfused_attention=True)
    plan = Compiler("tensorrt-rtx").compile(bundle.graph("target"), bundle.target.contract, key, tmp_path / "timings")
    assert len(bytes(plan)) > 10_000
