"""Caches of eight bits: how they round, what the check of an export sees, and which models are refused."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tensorrt_rtx as trt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trt_spec.engines import EIGHT_BITS, SLACK, Bundle, ExportError, in_eight_bits, keys_and_values
from trt_spec.export import ExportReport, export_bundle
from trt_spec.export.passes.quantise import Quantisation
from trt_spec.export.pipeline import model as export_model
from trt_spec.export.plans.compiler import Compiler, PlanKey
from trt_spec.export.tracing import cache as traced_cache
from trt_spec.export.tracing.eight_bits import narrowed, widened
from trt_spec.export.writing.graph import build_graph
from trt_spec.tools.exported import shown

from ..kit.bundles import export_pair
from ..kit.caches import factors_of
from ..kit.families import tiny_checkpoint
from ..kit.models import tiny_gemma2, tiny_llama
from ..kit.source_models import tiny_with_source

BFLOAT16 = torch.bfloat16


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ExportReport:
    folder = tmp_path_factory.mktemp("eight-bits")
    return export_bundle(tiny_llama(folder / "checkpoint"), folder / "bundle", cache="int8")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("scale_dtype", [torch.float16, BFLOAT16, torch.float32])
def test_to_round_twice_is_to_round_once_and_nothing_is_far_off(dtype: torch.dtype, scale_dtype: torch.dtype) -> None:
    entries = torch.randn(3, 4, 50, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-1, 2, 50)[:, None]
    entries[0, 0, 0] = 0
    numbers, scale = narrowed(entries, dtype, scale_dtype)
    once = widened(numbers, scale, torch.float32)
    again, scale_again = narrowed(once, dtype, scale_dtype)
    assert torch.equal(scale[0, 0, 1:], scale_again[0, 0, 1:])
    assert torch.equal(widened(again, scale_again, torch.float32), once)
    largest = entries.abs().amax(-1, keepdim=True)
    allowed = 0.51 / 127 if dtype == torch.int8 else 0.51 / 14  # half a step, and of E4M3 the step of the largest
    assert bool(((once - entries).abs() <= allowed * largest).all())


@pytest.mark.parametrize(("size", "share"), [(64, 66 / 128), (128, 130 / 256)])
@pytest.mark.parametrize("cache", EIGHT_BITS)
def test_a_token_takes_half_of_what_it_takes_in_float16(cache: str, size: int, share: float) -> None:
    full = keys_and_values(3, 2, size, "float16")
    for states in (full, keys_and_values(3, 2, size, "float32")):
        narrow = tuple(in_eight_bits(states, cache))
        assert sum(one.bytes for one in narrow) / sum(one.bytes for one in full) == share <= 0.53


def test_the_report_says_what_the_cache_has_cost(exported: ExportReport) -> None:
    check = Bundle.open(exported.path).target.check
    assert 0 < check["cache"]["divergence"] < 0.01
    assert 0.9 < check["cache"]["agreement"] <= 1
    assert check["cache"]["worst_error"] <= check["cache"]["tolerance"]
    said = next(line for line in shown(exported).splitlines() if "rounded cache" in line)
    assert said.startswith(f"target over its rounded cache, beside a full one: KL {check['cache']['divergence']:.1e}; ")


def test_onnxruntime_gets_a_graph_whose_scales_multiply_scores(exported: ExportReport) -> None:
    assert exported.models[0].fired["scale_scores"] == 2  # one in each layer
    assert Bundle.open(exported.path).target.check["worst_error"] < 1e-4
    assert not exported.notes


def with_large_channels(checkpoint: Path) -> Path:
    """The same function, whose keys are 64 times as large in two channels and queries so much smaller."""
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        for role, times in {"k_proj": 64.0, "q_proj": 1 / 64}.items():
            if role in name:
                weight.view(-1, 16, weight.shape[1])[:, [3, 11]] *= times  # which turn together
    save_file(weights, file, {"format": "pt"})
    return checkpoint


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_channels_of_keys_that_are_larger_than_others_cost_a_tenth_of_what_they_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    def cost(name: str) -> float:
        report = export_bundle(checkpoint, tmp_path / name, cache="int8", dtype=dtype)
        return float(report.models[0].entry.check["cache"]["divergence"])

    checkpoint = with_large_channels(tiny_llama(tmp_path / "c", num_attention_heads=8, num_key_value_heads=1))
    divided = cost("divided")
    factors = factors_of(tmp_path / "divided")
    assert list(factors) == ["key_0", "key_1"]
    assert all(one[0, 0, 3] > 4 * one[0, 0, 4] for one in factors.values())
    monkeypatch.setattr(export_model, "key_factors", lambda *_: {})
    assert cost("undivided") > 8 * divided


def test_factors_that_differ_from_those_of_the_check_fail_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def others(*given: Any, **more: Any) -> Any:
        return build_graph(*given[:-1], {name: one.flip(-1) for name, one in given[-1].items()}, **more)

    monkeypatch.setattr(export_model, "build_graph", others)
    with pytest.raises(ExportError, match=r"does not compute what its checkpoint computes: in the scenario 'deep"):
        export_bundle(tiny_llama(tmp_path / "c"), tmp_path / "b", cache="int8")


def test_half_precision_has_factors_that_round_no_query_and_fp8_has_none(tmp_path: Path) -> None:
    checkpoint = with_large_channels(tiny_llama(tmp_path / "c"))
    for dtype, cache in (("float16", "int8"), ("float32", "fp8")):
        export_bundle(checkpoint, tmp_path / cache, cache=cache, dtype=dtype, check=False)
    factors = factors_of(tmp_path / "int8")
    assert all(torch.equal(one.log2(), one.log2().round()) for one in factors.values())
    assert len(factors) == 2
    assert not factors_of(tmp_path / "fp8")


@pytest.mark.exhaustive
@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"weights": Quantisation("int8")}, {"cache": "fp8"}])
@pytest.mark.parametrize("make", [tiny_llama, tiny_gemma2, lambda path: tiny_checkpoint("gpt_oss", path)])
def test_the_check_passes_beside_other_numbers(tmp_path: Path, make: Callable[[Path], Path], settings: dict) -> None:
    report = export_bundle(make(tmp_path / "c"), tmp_path / "b", **{"cache": "int8"} | settings)
    assert "cache" in report.models[0].entry.check


def _cut(entries: Tensor, dtype: torch.dtype, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    _, scale = narrowed(entries, dtype, scale_dtype)
    return (entries / scale.float()).round().clamp(-100, 100).to(dtype), scale


def _of_another_size(entries: Tensor, dtype: torch.dtype, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    numbers, scale = narrowed(entries, dtype, scale_dtype)
    return numbers, (scale.float() * 1.01).to(scale_dtype)


@pytest.mark.parametrize(
    ("fault", "said"),
    [(_cut, "does not round its cache as"), (_of_another_size, "does not compute what its checkpoint")],
)
def test_a_cache_that_rounds_otherwise_or_has_other_scales_fails_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., tuple[Tensor, Tensor]], said: str
) -> None:
    monkeypatch.setattr(traced_cache, "narrowed", fault)
    with pytest.raises(ExportError, match=said):
        export_bundle(tiny_llama(tmp_path / "c"), tmp_path / "b", cache="int8")


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (tiny_checkpoint, "deepseek_v2", "has latent attention, which --cache int8 does not know"),
        (tiny_checkpoint, "granitemoehybrid", "has recurrent layers, which --cache int8 does not know"),
        (tiny_with_source, "t5", "has an encoder, expected a decoder alone for --cache int8"),
    ],
)
def test_models_that_keep_other_states_are_refused_by_name(
    tmp_path: Path, make: Callable[[str, Path], Path], kind: str, said: str
) -> None:
    with pytest.raises(ExportError, match=said):
        export_bundle(make(kind, tmp_path / "c"), tmp_path / "b", cache="int8")


def test_a_cache_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="cache is 'int4', expected full, int8, fp8"):
        export_bundle(tmp_path / "c", tmp_path / "b", cache="int4")


def test_tensorrt_refuses_it_by_name(tmp_path: Path) -> None:
    pair = export_pair(tiny_llama(tmp_path / "c"), tmp_path / "b", max_length=64, dtype="float16", cache="int8")
    bundle = Bundle.open(pair.bundle)
    key = PlanKey("target", "", "tensorrt-rtx", trt.__version__, "8.9", 5, 5, (1, 1), 64 + SLACK)
    compiler, graph, timings = Compiler("tensorrt-rtx"), bundle.graph("target"), tmp_path / "timings"
    with pytest.raises(ExportError, match=r"writes caches of float32, float16 and bfloat16 alone, .* in int8; export"):
        compiler.compile(graph, bundle.target.contract, key, timings)
    states = tuple(replace(state, dtype="float16") for state in bundle.target.contract.states)
    with pytest.raises(ExportError, match="cache has type Int8 but must have type Float, Half, or BFloat16"):
        compiler.compile(graph, replace(bundle.target.contract, states=states), key, timings)  # what it says itself


@pytest.mark.parametrize("settings", [{"cache": "int8"}, {"cache": "fp8", "dtype": "bfloat16"}])
def test_there_is_room_for_adapters_beside_it(tmp_path: Path, settings: dict) -> None:
    report = export_bundle(tiny_llama(tmp_path / "c"), tmp_path / "b", adapters=2, adapter_rank=4, **settings)
    check = report.models[0].entry.check
    assert check["adapters"]["same_bits"]
    assert 0 < check["adapters"]["worst_error"] < 1e-4
    assert "cache" in check
