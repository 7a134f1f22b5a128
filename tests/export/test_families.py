"""Every family of the table: what works computes what its checkpoint does, what is refused is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)
from trt_spec.engines import ROW, EngineError, ExportError
from trt_spec.engines.bundle import FUSED
from trt_spec.export import export_bundle
from trt_spec.export.families.table import RECURRENT_FAMILIES, REFUSED, WITH_SOURCES, WORKS
from trt_spec.export.families.text_models import READS_MORE
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.cli import main

from ..engines.parity import assert_engine_agrees
from ..kit.families import FORMS_OF_OTHERS, LATENT_FAMILIES, SINGLE_STEPS_DIFFER, tiny_checkpoint

IN_DEFAULT_TIER = ("qwen3_moe", "deepseek_v3", "lfm2")  # the first three families have tests of their own

EXPERTS = """
afmoe aria_text beam cohere2_moe dots1 ernie4_5_moe exaone_moe flex_olmo flint glm4_moe gpt_oss
granitemoe granitemoe_swa granitemoeshared hunyuan_v1_moe hy_v3 kolibri1 laguna mellum minimax_m2
minimax_m3_vl_text mixtral olmoe phimoe qwen2_moe qwen3_moe sarvam_moe solar_open
"""
WRITE_TEXT = (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)
REFUSED_BY_OPENVINO = {
    **dict.fromkeys(("gemma2", "vaultgemma"), "soft-cap"),
    **dict.fromkeys(("bloom", "doge", "mpt"), "adds numbers to the scores"),
    "diffllama": "the values of its attention are not the entries of one state",
    **dict.fromkeys(
        ("granite_swa", "gemma3n_text", "gemma4_text", "gemma4_unified_text"), "is read by more than one attention"
    ),
    "llama4_text": "its attention has a mask by Equal",
    **dict.fromkeys(EXPERTS.split(), "experts have three dimensions"),
    **dict.fromkeys(LATENT_FAMILIES, "the keys of its attention are not the entries of one state"),
    **dict.fromkeys(RECURRENT_FAMILIES, "takes no state of the kind 'row'"),
    "minimax": "takes no state of the kind 'window'",
}
WITH_NUMBERS = """
bailing_hybrid bloom codegen deepseek_v3 doge falcon flint gemma3n_text gemma4_text gpt2 gpt_bigcode gpt_neo
gpt_neox_japanese gpt_oss gptj granite_swa granitemoe_swa kimi_linear lfm2 llama4_text mamba2 minimax mpt xglm
zamba2
"""
FORGETS = {"minimax"}  # whose cache in transformers does not know where it stands if the first layer is recurrent
FUSED_IN_FIXED_SIZES = {"bitnet"}  # its norms, which round otherwise then: one model runs it at any size


def test_the_table_knows_every_type_of_transformers_that_writes_text() -> None:
    """Those that read images, sounds or a source, too."""
    assert not set(WORKS) & set(REFUSED)
    assert not set(READS_MORE) & {*WORKS, *REFUSED}
    assert {*WORKS, *REFUSED, *READS_MORE} == set().union(*WRITE_TEXT)
    assert all(REFUSED.values())
    assert set(FORMS_OF_OTHERS.split()) <= set(WORKS)


def in_its_tier(kind: str) -> Any:
    if kind in IN_DEFAULT_TIER:
        return kind
    by_hand = kind in FORMS_OF_OTHERS.split()
    return pytest.param(kind, marks=pytest.mark.families if by_hand else pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "kind",
    [
        in_its_tier(kind)
        for kind in WORKS
        if kind not in WITH_SOURCES  # which have tests of their own
    ],
)
def test_a_family_passes_the_check_and_its_greedy_text_is_transformers(tmp_path: Path, kind: str) -> None:
    checkpoint = tiny_checkpoint(kind, tmp_path / "checkpoint")
    report = export_bundle(checkpoint, tmp_path / "bundle")
    [target] = report.models
    assert target.entry.check["worst_error"] < 2e-4  # float32 rounding, on logits with a deviation of about 2
    assert not [note for note in report.notes if FUSED in note], "no graph was left out"
    absorbing = [state for state in target.entry.contract.of_kind(ROW) if state.name.startswith("state")]
    assert target.fired["absorb_lines"] == len(absorbing), "by ONNX Runtime's own operator, where there is one"
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    prompt = [5, 9, 17, 5, 9]
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": 24, "use_cache": kind not in (*SINGLE_STEPS_DIFFER, *FORGETS)}
    expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    with Decoder.open(tmp_path / "bundle") as decoder:
        [output] = decoder.generate(prompt, SamplingParams(max_new_tokens=24), draft_length=3, drafter="lookup")
    assert list(output.token_ids) == expected[0, len(prompt) :].tolist()
    assert_engine_agrees(tmp_path / "bundle")
    if kind in REFUSED_BY_OPENVINO:
        with pytest.raises(EngineError, match=f"engine openvino .*{REFUSED_BY_OPENVINO[kind]}"):
            assert_engine_agrees(tmp_path / "bundle", "openvino")
    else:
        assert_engine_agrees(tmp_path / "bundle", "openvino", fixes_sizes=kind not in FUSED_IN_FIXED_SIZES)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", WITH_NUMBERS.split())
def test_sinks_gates_latents_biases_and_convolutions_are_no_rougher_in_bfloat16(tmp_path: Path, kind: str) -> None:
    checkpoint = tiny_checkpoint(kind, tmp_path / "checkpoint")
    [target] = export_bundle(checkpoint, tmp_path / "bundle", dtype="bfloat16").models
    assert target.entry.check["worst_error"] < 2e-4  # constants rounded to bfloat16 would be off by ten times as much


@pytest.mark.parametrize("kind", {reason: kind for kind, reason in REFUSED.items()}.values())
def test_a_refused_family_is_refused_by_name_before_any_work(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": ["AnyForCausalLM"]}))
    with pytest.raises(ExportError) as refused:
        export_bundle(tmp_path, tmp_path / "bundle")
    assert f"has the model type {kind!r}, which cannot be exported: {REFUSED[kind]}" in str(refused.value)
    assert not (tmp_path / "bundle").exists()


def test_the_command_prints_every_family(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["families"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for kind in WORKS:
        assert any(line.split() == [kind, "works"] for line in lines), kind
    for kind in READS_MORE:
        assert any(line.split(maxsplit=1) == [kind, "works: its text model"] for line in lines), kind
    for kind, reason in REFUSED.items():
        assert any(line.split(maxsplit=1) == [kind, f"refused: {reason}"] for line in lines), kind
    assert main(["families", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == dict.fromkeys((*WORKS, *READS_MORE)) | REFUSED
