"""Each tensor that a fused operator gets lies as its kernel reads it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trt_spec.engines.torch import TorchEngine
from trt_spec.engines.torch.kernels import LAUNCHES
from trt_spec.export import export_bundle
from trt_spec.export.families.table import WITH_SOURCES, WORKS

from ...kit.adapters import Adapted
from ...kit.bundles import Pair
from ...kit.families import tiny_checkpoint
from ...kit.headed import Headed
from ...kit.layouts import STRIDED, Given, assert_kernels_read_what_is_there

COPIED = {  # what does not lie in rows where a kernel reads rows
    "gemma3n_text": frozenset({Given("norm", "x"), Given("norm_add", "residual")}),  # of streams side by side
}


def test_in_a_target_and_its_draft(llama: Pair) -> None:
    assert STRIDED.keys() == LAUNCHES.keys()
    found = assert_kernels_read_what_is_there(llama.bundle)
    assert found == {"add_norm", "angles", "attention", "gate", "norm", "product", "rotate_write"}


def test_beside_adapters(adapted: Adapted) -> None:
    found = assert_kernels_read_what_is_there(adapted.pair.bundle)
    assert found == {"add_norm", "angles", "attention", "gate", "norm", "product", "rotate_write"}


@pytest.mark.families
@pytest.mark.parametrize("kind", [kind for kind in WORKS if kind not in WITH_SOURCES])
def test_in_every_family(tmp_path: Path, kind: str) -> None:
    export_bundle(tiny_checkpoint(kind, tmp_path / "checkpoint"), tmp_path / "bundle", check=False)
    assert_kernels_read_what_is_there(tmp_path / "bundle", COPIED.get(kind, frozenset()))


@pytest.mark.exhaustive
def test_behind_sources_and_in_heads(t5: Path, whisper: Path, ahead: Path, every_kind: dict[str, Headed]) -> None:
    for bundle in (t5, whisper, ahead, every_kind["eagle3"].bundle):
        assert_kernels_read_what_is_there(bundle)


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_where_matrices_are_of_few_bits(in_few_bits: Callable[[str], Path], weights: str) -> None:
    assert "narrow_product" in assert_kernels_read_what_is_there(in_few_bits(weights))


def test_a_matrix_that_lies_by_columns_shows(llama: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: of steps of few rows of tokens it lies by rows."""
    convert = TorchEngine._convert

    def by_columns(engine: TorchEngine, shape: Any) -> Any:
        for name, matrix in engine._constants.items():
            if name.endswith(".rows"):
                engine._constants[name] = torch.empty_like(matrix.t().contiguous()).t()
        return convert(engine, shape)

    monkeypatch.setattr(TorchEngine, "_convert", by_columns)
    with pytest.raises(AssertionError, match=r"target: kernels misread .*'product', argument='matrix'"):
        assert_kernels_read_what_is_there(llama.bundle)
