"""Checkpoints that are quantised already: each method says what it means."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from trt_spec.engines import Bundle, ExportError, open_engine
from trt_spec.export import export_bundle
from trt_spec.export.checking.oracle import checkpoint_logits
from trt_spec.export.checking.quality import engine_logits
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.passes.quantise import Quantisation
from trt_spec.export.quantised import METHODS
from trt_spec.runtime import Decoder, SamplingParams

from ..kit.models import tiny_gpt2, tiny_llama
from ..kit.quantised_models import KINDS, write_quantised

pytestmark = pytest.mark.usefixtures("shared_traces")

PROMPT = [5, 9, 17, 5, 9]


def text_of(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    return found[0, len(PROMPT) :].tolist()


def assert_read_as_meant(checkpoint: Path, model: Any) -> None:
    """Compare with float32 rounding: each number is one product, which both sides may round once."""
    read = load_model(open_checkpoint(checkpoint), "float32")
    for name, weight in model.named_parameters():
        torch.testing.assert_close(read.get_parameter(name), weight, rtol=1e-6, atol=1e-7, msg=name)
    assert text_of(read) == text_of(model)


@pytest.mark.parametrize("name", KINDS)
def test_each_tensor_is_read_as_it_is_meant(tmp_path: Path, name: str) -> None:
    assert_read_as_meant(*write_quantised(KINDS[name], tmp_path))


@pytest.mark.parametrize(
    "name", [name if name in ("gptq", "mxfp4") else pytest.param(name, marks=pytest.mark.exhaustive) for name in KINDS]
)
def test_a_quantised_checkpoint_says_what_its_dequantised_model_says(tmp_path: Path, name: str) -> None:
    checkpoint, model = write_quantised(KINDS[name], tmp_path)
    report = export_bundle(checkpoint, tmp_path / "bundle")
    assert report.notes[-1] == f"{checkpoint} is quantised by {KINDS[name].words}: dequantised and stored anew"
    entry = Bundle.open(tmp_path / "bundle").target
    assert entry.dequantised == f"{KINDS[name].words}: dequantised and stored anew"
    assert entry.check["quality"]["divergence"] < 1e-8  # of the graph from the dequantised checkpoint
    with Decoder.open(tmp_path / "bundle") as decoder:
        [output] = decoder.generate(PROMPT, SamplingParams(max_new_tokens=24), draft_length=3, drafter="lookup")
    assert list(output.token_ids) == text_of(model)


@pytest.mark.parametrize(("name", "rounded"), [("fp8 tensor", True), ("compressed int4", False), ("awq", False)])
def test_a_checkpoint_whose_activations_others_round_says_so(tmp_path: Path, name: str, rounded: bool) -> None:
    checkpoint, _ = write_quantised(KINDS[name], tmp_path)
    assert any("texts may differ from those of vLLM" in note for note in open_checkpoint(checkpoint).notes) is rounded


@pytest.mark.parametrize("name", ["fp8 tensor", "fp8 experts", "mxfp4"])
def test_transformers_dequantises_to_the_same_bits_where_it_can(tmp_path: Path, name: str) -> None:
    checkpoint, _ = write_quantised(KINDS[name], tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)  # without a GPU it dequantises
    read = load_model(open_checkpoint(checkpoint), "float32")
    for tensor, weight in theirs.named_parameters():
        assert torch.equal(read.get_parameter(tensor), weight), tensor


def without(ending: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda parts: {name: part for name, part in parts.items() if name != ending}


def instead(ending: str, change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda parts: parts | {ending: change(parts[ending])}


def other_halves(numbers: Tensor) -> Tensor:
    """Swap the two numbers of each byte."""
    stored = numbers.contiguous().view(torch.uint8)
    return ((stored >> 4) | (stored << 4)).view(numbers.dtype)


def every(word: int) -> Callable[[Tensor], Tensor]:
    return lambda words: torch.full_like(words, word - 2**32 if word >= 2**31 else word)


FAULTS: list[tuple[str, str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = [
    ("nibbles in the other order", "gptq", instead(".qweight", other_halves)),
    ("nibbles in the other order", "awq", instead(".qweight", other_halves)),
    ("nibbles in the other order", "compressed int4", instead(".weight_packed", other_halves)),
    ("nibbles in the other order", "nf4", instead(".weight", other_halves)),
    ("nibbles in the other order", "mxfp4", instead("_blocks", other_halves)),
    ("zero points taken for the middle", "gptq", instead(".qzeros", every(0x77777777))),
    ("zero points taken for the middle", "awq", instead(".qzeros", every(0x88888888))),
    ("zero points taken for the middle", "compressed int4 with zero points", without(".weight_zero_point")),
    ("zero points in the other order", "awq", instead(".qzeros", other_halves)),
    ("another order ignored", "gptq in another order", without(".g_idx")),
    ("scales that divide", "fp8 blocks", instead(".weight_scale_inv", torch.reciprocal)),
    ("exponents off by one", "mxfp4", instead("_scales", lambda exponents: exponents + 1)),
    ("largest numbers taken for steps", "bitsandbytes int8", instead(".SCB", lambda scales: scales * 127)),
    ("scales of scales ignored", "nf4 nested", instead(".weight.nested_absmax", torch.ones_like)),
]


@pytest.mark.parametrize(("fault", "name", "change"), FAULTS, ids=[f"{name}: {fault}" for fault, name, _ in FAULTS])
def test_a_planted_fault_is_seen(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    name: str,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
) -> None:
    checkpoint, model = write_quantised(KINDS[name], tmp_path)
    called = open_checkpoint(checkpoint).quantised["quant_method"]
    right = METHODS[called]
    wrong = replace(right, matrix=lambda parts, settings: right.matrix(change(parts), settings))
    monkeypatch.setitem(METHODS, called, wrong)
    with pytest.raises(AssertionError):
        assert_read_as_meant(checkpoint, model)
    assert text_of(load_model(open_checkpoint(checkpoint), "float32")) != text_of(model)


def test_a_fault_of_zero_points_less_one_is_seen(tmp_path: Path) -> None:
    checkpoint, model = write_quantised(KINDS["gptq"], tmp_path)
    change_settings(checkpoint, checkpoint_format="gptq_v2")
    with pytest.raises(AssertionError):
        assert_read_as_meant(checkpoint, model)


def change_settings(checkpoint: Path, **settings: Any) -> None:
    fields = json.loads((checkpoint / "config.json").read_text())
    fields["quantization_config"] |= settings
    (checkpoint / "config.json").write_text(json.dumps(fields))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"quant_method": "hqq"}, "is quantised by hqq, expected awq, bitsandbytes, compressed-tensors"),
        ({"quant_method": "aqlm"}, "is quantised by aqlm, expected"),
        ({"bits": 4}, "is quantised by some method, expected"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "by gptq, and bits is 3, expected 2 or 4 or 8"),
        ({"quant_method": "gptq", "bits": 4}, "by gptq, and group_size is None, expected a whole number"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
            "checkpoint_format is 'marlin', expected gptq or gptq_v2",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"mlp": {"bits": 8}}},
            "dynamic gives single layers other settings",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point is false"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size is 128, expected two sizes"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24"},
            "format is marlin-24, expected pack-quantized",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "by modelopt, and quant_algo is 'W4A8_AWQ', expected"),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "its zeros are left out",
        ),
        ({"quant_method": "compressed-tensors", "transform_config": {"a": 1}}, "its weights are rotated"),
        ({"quant_method": "compressed-tensors"}, "config_groups lacks the settings of weights"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_before_any_weight_is_read(
    tmp_path: Path, settings: dict[str, Any], expected: str
) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint")
    (checkpoint / "model.safetensors").write_bytes(b"nothing that could be read")
    fields = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(fields | {"quantization_config": settings}))
    with pytest.raises(ExportError) as refused:
        export_bundle(checkpoint, tmp_path / "bundle")
    assert expected in str(refused.value)
    assert str(checkpoint) in str(refused.value)


def test_matrices_that_may_lie_either_way_are_refused(tmp_path: Path) -> None:
    checkpoint = tiny_gpt2(tmp_path / "checkpoint")
    fields = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(fields | {"quantization_config": KINDS["gptq"].settings}))
    with pytest.raises(ExportError, match="is quantised by gptq, and a gpt2 keeps its matrices transposed"):
        open_checkpoint(checkpoint)


MLP = "model.layers.0.mlp.up_proj"
DAMAGES: list[tuple[str, Callable[[dict[str, Tensor]], Any], str]] = [
    (
        "gptq",
        lambda stored: stored.pop(f"{MLP}.qzeros"),
        f"tensor {MLP}.(qweight|scales) of checkpoint .* without what belongs to it: {MLP}.qzeros",
    ),
    ("gptq", lambda stored: stored.pop(f"{MLP}.qweight"), f"without what belongs to it: {MLP}.qweight"),
    ("gptq", lambda stored: stored.update({f"{MLP}.g_idx": torch.full((32,), 9)}), f"{MLP}.* names group 9"),
    ("gptq", lambda stored: stored.update({f"{MLP}.qzeros": torch.zeros(1, 8, dtype=torch.int32)}), f"{MLP}.*qzeros"),
    ("gptq", lambda stored: stored.update({f"{MLP}.secret": torch.zeros(2)}), f"the first is {MLP}.secret"),
    ("gptq", lambda stored: stored.update({f"{MLP}.secret": torch.zeros(2).int()}), f"tensor {MLP}.secret .* as I32"),
    ("fp8 tensor", lambda stored: stored.pop(f"{MLP}.weight_scale_inv"), f"tensor {MLP}.weight .* as F8_E4M3, and no"),
    (
        "awq",
        lambda stored: stored.update({f"{MLP}.scales": torch.ones(2, 63)}),
        f"{MLP}.* \\[2, 63\\], expected \\[2, 64",
    ),
    ("nf4", lambda stored: stored.update({f"{MLP}.weight.absmax": torch.ones(7)}), f"{MLP}.*absmax has the shape"),
    ("compressed int4", lambda stored: stored.pop(f"{MLP}.weight_shape"), f"{MLP}.*weight_shape is not there, and"),
    (
        "modelopt nvfp4",
        lambda stored: stored.pop(f"{MLP}.weight_scale_2"),
        f"{MLP}.* is torch.uint8 beside scales, expected float8_e4m3fn",
    ),
    (
        "modelopt nvfp4",
        lambda stored: stored.update({f"{MLP}.pre_quant_scale": torch.ones(32)}),
        f"the first is {MLP}.pre_quant_scale",
    ),
    (
        "compressed nvfp4",
        lambda stored: stored.update({f"{MLP}.weight_zero_point": torch.ones(64, 2)}),
        f"{MLP}.* zero points or groups in another order",
    ),
    ("fp8 tensor", lambda stored: stored.clear(), "says that it is quantised by fp8, but no tensor is"),
]


@pytest.mark.parametrize(("name", "damage", "expected"), DAMAGES)
def test_a_tensor_that_is_not_understood_is_named(
    tmp_path: Path, name: str, damage: Callable[[dict[str, Tensor]], Any], expected: str
) -> None:
    checkpoint, _ = write_quantised(KINDS[name], tmp_path)
    stored = load_file(checkpoint / "model.safetensors")
    damage(stored)
    save_file(stored, checkpoint / "model.safetensors")
    with pytest.raises(ExportError, match=expected):
        load_model(open_checkpoint(checkpoint), "float32")


@pytest.mark.parametrize("weights", ["int8", pytest.param("int4", marks=pytest.mark.exhaustive)])
def test_it_is_stored_anew_as_any_checkpoint_is(tmp_path: Path, weights: str) -> None:
    checkpoint, _ = write_quantised(KINDS["nf4"], tmp_path)
    [target] = export_bundle(checkpoint, tmp_path / "bundle", weights=Quantisation(weights)).models
    assert target.entry.weights == weights
    assert target.entry.dequantised == f"{KINDS['nf4'].words}: dequantised and stored anew"
    assert target.entry.check["quality"]["divergence"] > 0


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("gptq, symmetric", "int4"),
        ("compressed int8", "int8"),
        ("awq", "int4"),
        ("awq", "int8"),
        ("compressed fp8", "fp8"),
        pytest.param("fp8 tensor", "fp8", marks=pytest.mark.exhaustive),
        pytest.param("fp8 blocks", "fp8", marks=pytest.mark.exhaustive),
        pytest.param("compressed fp8 in groups", "fp8", marks=pytest.mark.exhaustive),
        pytest.param("gptq", "int4", marks=pytest.mark.exhaustive),
        pytest.param("gptq", "int8", marks=pytest.mark.exhaustive),
        pytest.param("compressed int4 with zero points", "int4", marks=pytest.mark.exhaustive),
        pytest.param("compressed int4 with zero points", "int8", marks=pytest.mark.exhaustive),
        pytest.param("compressed int4", "int4", marks=pytest.mark.exhaustive),
        pytest.param("compressed int4", "int8", marks=pytest.mark.exhaustive),
        pytest.param("compressed int8 packed", "int8", marks=pytest.mark.exhaustive),
    ],
)
def test_whole_numbers_in_groups_are_kept_bit_for_bit(tmp_path: Path, name: str, weights: str) -> None:
    checkpoint, model = write_quantised(KINDS[name], tmp_path)
    how = Quantisation(weights, wide_head=True, wide_embedding=True)  # these two are not quantised in the checkpoint
    report = export_bundle(checkpoint, tmp_path / "bundle", weights=how)
    kept = f"{KINDS[name].words}: 14 of 14 matrices kept bit for bit, the others stored anew"
    assert report.notes[-1] == f"{checkpoint} is quantised by {kept}"
    entry = Bundle.open(tmp_path / "bundle").target
    assert (entry.weights, entry.dequantised) == (weights, kept)
    assert entry.check["worst_error"] < 5e-5
    stored = wide_matrices(Bundle.open(tmp_path / "bundle").graph("target"))
    for layer in model.model.layers:
        meant = {module: one.weight for module, one in layer.named_modules() if module.endswith("_proj")}
        if name not in ("compressed fp8", "fp8 tensor"):  # whose scales are for columns, so that they stay apart
            meant["qkv"] = torch.cat([meant.pop(f"self_attn.{each}_proj") for each in "qkv"])
        for matrix in meant.values():
            assert any(torch.equal(matrix.T, one) for one in stored)
    engine = open_engine(
        "onnxruntime", Bundle.open(tmp_path / "bundle").graph("target"), entry.contract, exact_weights=True
    )
    found = engine_logits(engine, PROMPT)
    engine.close()
    assert torch.dist(found, checkpoint_logits(model, PROMPT), torch.inf) < 5e-5  # float32 rounding, as unquantised
    for exact in ("torch", "openvino"):  # which do not round activations
        with Decoder.open(tmp_path / "bundle", engine=exact) as decoder:
            [output] = decoder.generate(PROMPT, SamplingParams(max_new_tokens=24), draft_length=3, drafter="lookup")
        assert list(output.token_ids) == text_of(model)


@pytest.mark.parametrize("name", ["modelopt nvfp4", pytest.param("compressed nvfp4", marks=pytest.mark.exhaustive)])
def test_nvfp4_is_kept_bit_for_bit(tmp_path: Path, name: str) -> None:
    checkpoint, model = write_quantised(KINDS[name], tmp_path)
    [target] = export_bundle(checkpoint, tmp_path / "bundle", weights=Quantisation("nvfp4", wide_head=True)).models
    kept = f"{KINDS[name].words}: 14 of 14 matrices kept bit for bit, the others stored anew"
    assert (target.entry.weights, target.entry.dequantised) == ("nvfp4", kept)
    assert target.entry.check["quality"]["divergence"] < 1e-8
    with Decoder.open(tmp_path / "bundle", engine="torch") as decoder:
        [output] = decoder.generate(PROMPT, SamplingParams(max_new_tokens=24), draft_length=3, drafter="lookup")
    assert list(output.token_ids) == text_of(model)


def test_settings_of_the_model_optimizer_may_be_in_a_file_of_their_own(tmp_path: Path) -> None:
    kind = KINDS["modelopt nvfp4"]
    checkpoint, model = write_quantised(kind, tmp_path)
    fields = json.loads((checkpoint / "config.json").read_text())
    settings = {name: fields["quantization_config"][name] for name in ("quant_algo", "config_groups")}
    del fields["quantization_config"]
    (checkpoint / "config.json").write_text(json.dumps(fields))
    (checkpoint / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    assert_read_as_meant(checkpoint, model)


def test_nvfp4_in_half_precision_says_that_its_scales_are_rounded(tmp_path: Path) -> None:
    kind = KINDS["modelopt nvfp4"]
    checkpoint, _ = write_quantised(kind, tmp_path)
    how = {"dtype": "bfloat16", "weights": Quantisation("nvfp4", wide_head=True)}
    [target] = export_bundle(checkpoint, tmp_path / "bundle", **how).models
    said = f"{kind.words}: 14 of 14 matrices kept, their scales rounded, the others stored anew"
    assert target.entry.dequantised == said


@pytest.mark.parametrize("in_config", [True, False])
def test_a_checkpoint_whose_cache_alone_is_quantised_is_read_as_any_other(tmp_path: Path, in_config: bool) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint")
    plain = load_model(open_checkpoint(checkpoint), "float32")
    settings = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    if in_config:
        fields = json.loads((checkpoint / "config.json").read_text())
        fields["quantization_config"] = {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8}}
        (checkpoint / "config.json").write_text(json.dumps(fields))
    else:
        (checkpoint / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    stored = load_file(checkpoint / "model.safetensors")
    stored |= {f"model.layers.0.self_attn.{one}_proj.{one}_scale": torch.ones(1) for one in "kv"}
    save_file(stored, checkpoint / "model.safetensors", {"format": "pt"})
    opened = open_checkpoint(checkpoint)
    assert opened.quantised is None
    assert text_of(load_model(opened, "float32")) == text_of(plain)


def wide_matrices(graph: Path) -> list[Tensor]:
    """What the stored integers stand for, by the operator's own words."""
    found = []
    for node in ir.load(graph).graph:
        if node.op_type == "DequantizeLinear":
            parts = (torch.tensor(value.const_value.numpy().astype("float32")) for value in node.inputs)
            numbers, scales, zeros, *_ = *parts, torch.zeros(1)
            scales = scales.view(-1, numbers.shape[1])
            blocks = numbers.view(len(scales), -1, numbers.shape[1])
            found.append(((blocks - zeros[..., None, :]) * scales[:, None]).view_as(numbers))
    return found


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("gptq in another order", "int4"),
        ("compressed int8", "int4"),
        ("compressed fp8", "int8"),
        ("mxfp4", "nvfp4"),
        ("gptq v2, 8 bits", "int8"),  # what lies between number and zero point takes nine bits
    ],
)
def test_what_a_graph_cannot_hold_is_rounded_anew(tmp_path: Path, name: str, weights: str) -> None:
    checkpoint, _ = write_quantised(KINDS[name], tmp_path)
    report = export_bundle(checkpoint, tmp_path / "bundle", weights=Quantisation(weights), check=False)
    assert report.models[0].entry.dequantised.endswith(": dequantised and stored anew")
