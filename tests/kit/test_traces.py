"""A trace that is shared is the one that would have been made."""

from pathlib import Path

from trt_spec.export import export_bundle
from trt_spec.export.passes.quantise import Quantisation

from .models import tiny_gpt2
from .traces import sharing_traces


def test_an_export_that_takes_an_earlier_trace_writes_the_bytes_of_one_that_does_not(tmp_path: Path) -> None:
    """Of other weights than were traced, with a tied head, each rounded in place."""
    first, second = (tiny_gpt2(tmp_path / str(seed), seed=seed, n_layer=1) for seed in (0, 1))
    with sharing_traces():
        export_bundle(first, tmp_path / "first", check=False)
        export_bundle(second, tmp_path / "shared", weights=Quantisation("int4"), check=False)
    export_bundle(second, tmp_path / "alone", weights=Quantisation("int4"), check=False)
    for name in ("model.onnx", "weights.bin"):
        shared, alone = ((tmp_path / bundle / "target" / name).read_bytes() for bundle in ("shared", "alone"))
        assert shared == alone
    assert shared != (tmp_path / "first" / "target" / "weights.bin").read_bytes()
