"""Checkpoints that are quantised already: each method, packed here by its published format, says what it means."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from trt_spec.engines import Bundle, ExportError, open_engine
from trt_spec.export import export_bundle
from trt_spec.export.checkpoint import load_model, open_checkpoint
from trt_spec.export.passes.quantise import Quantisation
from trt_spec.export.quality import checkpoint_logits, engine_logits
from trt_spec.export.quantised import METHODS
from trt_spec.runtime import Decoder, SamplingParams

from ..families import tiny_checkpoint
from ..models import tiny_gpt2, tiny_llama

pytestmark = pytest.mark.usefixtures("shared_traces")

Packed = tuple[dict[str, Tensor], Tensor]  # what a matrix is stored as, by endings, and the numbers that it means
GROUP = 16
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
NF4 = [-1, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626]
NF4 += [0.7230, 1.0]  # rounded: a checkpoint carries its own table
PROMPT = [5, 9, 17, 5, 9]


def words_of(numbers: np.ndarray, bits: int, order: list[int] | None = None) -> Tensor:
    """Pack `[R, C]` along the columns into words of 32 bits, one number at a time."""
    each = 32 // bits
    order = order or list(range(each))
    words = np.zeros((numbers.shape[0], numbers.shape[1] // each), dtype=np.uint32)
    for row, column in np.ndindex(words.shape):
        word = 0
        for place, which in enumerate(order):
            word |= int(numbers[row, column * each + which]) << (bits * place)
        words[row, column] = word
    return torch.from_numpy(words.view(np.int32).copy())


def affine(weight: Tensor, bits: int, group: int, symmetric: bool = False) -> tuple[np.ndarray, ...]:
    """Round `[N, K]` to unsigned numbers, with scales and zero points `[N, G]`, and give what they mean."""
    highest = 2**bits - 1
    numbers = np.zeros(weight.shape, dtype=np.int64)
    meant = np.zeros(weight.shape, dtype=np.float32)
    scales = np.zeros((weight.shape[0], weight.shape[1] // group), dtype=np.float32)
    zeros = np.zeros(scales.shape, dtype=np.int64)
    for n, g in np.ndindex(scales.shape):
        part = weight[n, g * group : (g + 1) * group].numpy()
        low, high = min(part.min(), 0.0), max(part.max(), 0.0)
        if symmetric:
            high = max(abs(low), high)
            low = -high
        scales[n, g] = np.float16((high - low) / highest)
        zeros[n, g] = (highest + 1) // 2 if symmetric else np.clip(round(-low / scales[n, g]), 1, highest)
        found = np.clip(np.round(part / scales[n, g]) + zeros[n, g], 0, highest)
        numbers[n, g * group : (g + 1) * group] = found
        meant[n, g * group : (g + 1) * group] = (found - zeros[n, g]) * scales[n, g]
    return numbers, scales, zeros, meant


def gptq_matrix(
    weight: Tensor, bits: int = 4, less: int = 1, shuffled: bool = False, group: int = GROUP, symmetric: bool = False
) -> Packed:
    rows = weight.shape[1]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(3)) if shuffled else torch.arange(rows)
    group = rows if group == -1 else group
    numbers, scales, zeros, meant = affine(weight[:, order], bits, group, symmetric)
    back = torch.argsort(order)
    return {
        ".qweight": words_of(numbers[:, back], bits).T.contiguous(),
        ".qzeros": words_of(zeros.T - less, bits),
        ".scales": torch.from_numpy(scales.T.copy()).half(),
        ".g_idx": (torch.arange(rows) // group)[back].int(),
    }, torch.from_numpy(meant)[:, back]


def awq_matrix(weight: Tensor) -> Packed:
    numbers, scales, zeros, meant = affine(weight, 4, GROUP)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        ".qweight": words_of(numbers.T, 4, order),
        ".qzeros": words_of(zeros.T, 4, order),
        ".scales": torch.from_numpy(scales.T.copy()).half(),
    }, torch.from_numpy(meant)


def packed_matrix(weight: Tensor, bits: int = 4, symmetric: bool = True, group: int = GROUP) -> Packed:
    numbers, scales, zeros, meant = affine(weight, bits, group, symmetric)
    parts = {
        ".weight_packed": words_of(numbers, bits),
        ".weight_scale": torch.from_numpy(scales).half(),
        ".weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        parts[".weight_zero_point"] = words_of(zeros.T, bits).T.contiguous()
    return parts, torch.from_numpy(meant)


def int8_matrix(weight: Tensor) -> Packed:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    numbers = (weight / scales.float()).round().clamp(-127, 127)
    return {".weight": numbers.to(torch.int8), ".weight_scale": scales}, numbers * scales.float()


def fp8_rows(weight: Tensor) -> Packed:
    scales = weight.abs().amax(1, keepdim=True) / 448
    numbers = (weight / scales).to(torch.float8_e4m3fn)
    return {".weight": numbers, ".weight_scale": scales, ".input_scale": torch.ones(1)}, numbers.float() * scales


def fp8_blocks(weight: Tensor, rows: int = 24, columns: int = 16) -> Packed:
    """Blocks whose last ones are cut off, as 24 rows of 32 are."""
    scales = torch.zeros(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    numbers, meant = torch.zeros(weight.shape, dtype=torch.float8_e4m3fn), torch.zeros(weight.shape)
    for place in np.ndindex(*scales.shape):
        part = tuple(slice(at * size, (at + 1) * size) for at, size in zip(place, (rows, columns), strict=True))
        scales[place] = weight[part].abs().max() / 448
        numbers[part] = (weight[part] / scales[place]).to(torch.float8_e4m3fn)
        meant[part] = numbers[part].float() * scales[place]
    return {".weight": numbers, ".weight_scale_inv": scales}, meant


def fp8_tensor(weight: Tensor) -> Packed:
    scale = weight.abs().max() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    return {".weight": numbers, ".weight_scale_inv": scale, ".activation_scale": scale}, numbers.float() * scale


def nf4_matrix(weight: Tensor, nested: bool = False, kind: str = "nf4") -> Packed:
    table = torch.tensor(NF4) if kind == "nf4" else torch.tensor(E2M1) / 6
    flat, size = weight.flatten(), 64
    largest = flat.view(-1, size).abs().amax(1)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": size, "dtype": "float32", "shape": list(weight.shape)}
    parts = {".weight.quant_map": table}
    if nested:
        offset = float(largest.mean())
        codes = torch.linspace(-1, 1, 256)
        scale = (largest - offset).abs().view(-1, 4).amax(1)  # for four blocks each
        nearest = ((largest - offset).view(-1, 4) / scale[:, None]).flatten()[:, None].sub(codes).abs().argmin(1)
        largest = codes[nearest] * scale.repeat_interleave(4) + offset
        parts |= {".weight.absmax": nearest.to(torch.uint8), ".weight.nested_absmax": scale}
        parts |= {".weight.nested_quant_map": codes}
        state |= {"nested_blocksize": 4, "nested_offset": offset, "nested_dtype": "float32"}
    else:
        parts[".weight.absmax"] = largest
    numbers = (flat.view(-1, size) / largest[:, None]).flatten()[:, None].sub(table).abs().argmin(1)
    parts[".weight"] = torch.tensor([[int(first) * 16 + int(second)] for first, second in numbers.view(-1, 2)]).byte()
    parts[f".weight.quant_state.bitsandbytes__{kind}"] = torch.tensor(list(json.dumps(state).encode())).byte()
    return parts, (table[numbers].view(-1, size) * largest[:, None]).view(weight.shape)


def bnb_int8_matrix(weight: Tensor) -> Packed:
    largest = weight.abs().amax(1)
    numbers = (weight / largest[:, None] * 127).round()
    parts = {".weight": numbers.to(torch.int8), ".SCB": largest, ".weight_format": torch.tensor(0).byte()}
    return parts, numbers * largest[:, None] / 127


def mxfp4_experts(weight: Tensor) -> Packed:
    """Experts `[E, K, N]`, stored with their columns as rows."""
    turned = weight.mT.contiguous()
    parts = turned.view(*turned.shape[:2], -1, 32)  # [E, N, K / 32, 32]
    exponents = (parts.abs().amax(-1) / 6).log2().ceil()
    numbers = (parts / exponents.exp2()[..., None])[..., None].sub(torch.tensor(E2M1)).abs().argmin(-1)
    meant = torch.tensor(E2M1)[numbers] * exponents.exp2()[..., None]
    blocks = numbers[..., 0::2] + 16 * numbers[..., 1::2]
    stored = {"_blocks": blocks.byte(), "_scales": (exponents + 127).byte()}
    return stored, meant.view_as(turned).mT.contiguous()


def groups_of(**weights: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


@dataclass(frozen=True)
class Kind:
    """A method with one of its settings."""

    settings: dict[str, Any]
    pack: Callable[[Tensor], Packed]
    words: str  # of the report
    family: str = "llama"


KINDS = {
    "fp8 blocks": Kind(
        {"quant_method": "fp8", "weight_block_size": [24, 16], "activation_scheme": "dynamic"},
        fp8_blocks,
        "fp8, 8 bits (E4M3), blocks of 24 × 16",
    ),
    "fp8 tensor": Kind({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor, "fp8, 8 bits (E4M3)"),
    "fp8 experts": Kind(
        {"quant_method": "fp8", "weight_block_size": [16, 16]},
        lambda weight: fp8_blocks(weight, 16),
        "fp8, 8 bits (E4M3), blocks of 16 × 16",
        "qwen3_moe",
    ),
    "mxfp4": Kind({"quant_method": "mxfp4"}, mxfp4_experts, "mxfp4, 4 bits (E2M1), groups of 32", "gpt_oss"),
    "compressed int4": Kind(
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        | groups_of(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True),
        packed_matrix,
        "compressed-tensors, 4 bits, groups of 16",
    ),
    "compressed int4 with zero points": Kind(
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        | groups_of(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=False),
        lambda weight: packed_matrix(weight, symmetric=False),
        "compressed-tensors, 4 bits, groups of 16",
    ),
    "compressed int8": Kind(
        {"quant_method": "compressed-tensors", "format": "int-quantized"}
        | groups_of(num_bits=8, type="int", strategy="channel"),
        int8_matrix,
        "compressed-tensors, 8 bits, one scale a channel",
    ),
    "compressed int8 packed": Kind(
        {"quant_method": "compressed-tensors", "format": "pack-quantized"}
        | groups_of(num_bits=8, type="int", strategy="group", group_size=GROUP),
        lambda weight: packed_matrix(weight, bits=8),
        "compressed-tensors, 8 bits, groups of 16",
    ),
    "compressed fp8": Kind(
        {"quant_method": "compressed-tensors", "format": "float-quantized"}
        | groups_of(num_bits=8, type="float", strategy="channel"),
        fp8_rows,
        "compressed-tensors, 8 bits (E4M3), one scale a channel",
    ),
    "gptq": Kind({"quant_method": "gptq", "bits": 4, "group_size": GROUP}, gptq_matrix, "gptq, 4 bits, groups of 16"),
    "gptq, symmetric": Kind(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True},
        lambda weight: gptq_matrix(weight, symmetric=True),
        "gptq, 4 bits, groups of 16",
    ),
    "gptq in another order": Kind(
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True},
        lambda weight: gptq_matrix(weight, shuffled=True),
        "gptq, 4 bits, groups of 16, rows in another order",
    ),
    "gptq v2, 8 bits": Kind(
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "checkpoint_format": "gptq_v2"},
        lambda weight: gptq_matrix(weight, bits=8, less=0, group=-1),
        "gptq, 8 bits, one scale a channel",
    ),
    "awq": Kind(
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
        awq_matrix,
        "awq, 4 bits, groups of 16",
    ),
    "nf4": Kind(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        nf4_matrix,
        "bitsandbytes, 4 bits (NF4)",
    ),
    "nf4 nested": Kind(
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
        lambda weight: nf4_matrix(weight, nested=True),
        "bitsandbytes, 4 bits (NF4), scales in 8 bits",
    ),
    "fp4": Kind(
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        lambda weight: nf4_matrix(weight, kind="fp4"),
        "bitsandbytes, 4 bits (FP4)",
    ),
    "bitsandbytes int8": Kind(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, bnb_int8_matrix, "bitsandbytes, 8 bits, one scale a row"
    ),
}


def write_quantised(kind: Kind, path: Path) -> tuple[Path, Any]:
    """Write a checkpoint whose matrices are quantised; returns transformers' model with the numbers that they mean."""
    checkpoint = tiny_llama(path / "quantised") if kind.family == "llama" else tiny_checkpoint(kind.family, path / "q")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    plain = load_file(checkpoint / "model.safetensors")
    stored, meant = {}, {}
    for name, weight in plain.items():
        experts = name.endswith(("gate_up_proj", "down_proj"))
        if experts if kind.family == "gpt_oss" else "_proj.weight" in name:
            parts, meant[name] = kind.pack(weight)
            base = name if kind.family == "gpt_oss" else name.removesuffix(".weight")
            stored |= {base + ending: part.contiguous().clone() for ending, part in parts.items()}
        else:
            stored[name] = meant[name] = weight
    assert len(meant) == len(plain)
    save_file(meant, checkpoint / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    save_file(stored, checkpoint / "model.safetensors")
    fields = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(fields | {"quantization_config": kind.settings}))
    return checkpoint, model


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
    assert report.notes == [f"{checkpoint} is quantised by {KINDS[name].words}: dequantised and stored anew"]
    entry = Bundle.open(tmp_path / "bundle").target
    assert entry.dequantised == f"{KINDS[name].words}: dequantised and stored anew"
    assert entry.check["quality"]["divergence"] < 1e-8  # of the graph from the dequantised checkpoint
    with Decoder.open(tmp_path / "bundle") as decoder:
        [output] = decoder.generate(PROMPT, SamplingParams(max_new_tokens=24), draft_length=3, drafter="lookup")
    assert list(output.token_ids) == text_of(model)


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
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "format is nvfp4-pack-quantized, expected pack-quantized",
        ),
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
    checkpoint, _ = write_quantised(KINDS["awq"], tmp_path)
    [target] = export_bundle(checkpoint, tmp_path / "bundle", weights=Quantisation(weights)).models
    assert target.entry.weights == weights
    assert target.entry.dequantised == f"{KINDS['awq'].words}: dequantised and stored anew"
    assert target.entry.check["quality"]["divergence"] > 0


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("gptq, symmetric", "int4"),
        ("compressed int8", "int8"),
        pytest.param("compressed int4", "int4", marks=pytest.mark.exhaustive),
        pytest.param("compressed int4", "int8", marks=pytest.mark.exhaustive),
        pytest.param("compressed int8 packed", "int8", marks=pytest.mark.exhaustive),
    ],
)
def test_matrices_with_zero_points_in_the_middle_are_kept_bit_for_bit(tmp_path: Path, name: str, weights: str) -> None:
    checkpoint, model = write_quantised(KINDS[name], tmp_path)
    how = Quantisation(weights, wide_head=True, wide_embedding=True)  # these two are not quantised in the checkpoint
    report = export_bundle(checkpoint, tmp_path / "bundle", weights=how)
    kept = f"{KINDS[name].words}: 14 of 14 matrices kept bit for bit, the others stored anew"
    assert report.notes == [f"{checkpoint} is quantised by {kept}"]
    entry = Bundle.open(tmp_path / "bundle").target
    assert (entry.weights, entry.dequantised) == (weights, kept)
    assert entry.check["worst_error"] < 5e-5
    engine = open_engine(
        "onnxruntime", Bundle.open(tmp_path / "bundle").graph("target"), entry.contract, exact_weights=True
    )
    found = engine_logits(engine, PROMPT)
    engine.close()
    assert torch.dist(found, checkpoint_logits(model, PROMPT), torch.inf) < 5e-5  # float32 rounding, as unquantised


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("gptq", "int4"),
        ("gptq in another order", "int4"),
        ("compressed int4 with zero points", "int4"),
        ("compressed int8", "int4"),
    ],
)
def test_what_a_graph_cannot_hold_is_rounded_anew(tmp_path: Path, name: str, weights: str) -> None:
    checkpoint, _ = write_quantised(KINDS[name], tmp_path)
    report = export_bundle(checkpoint, tmp_path / "bundle", weights=Quantisation(weights), check=False)
    assert report.models[0].entry.dequantised.endswith(": dequantised and stored anew")
