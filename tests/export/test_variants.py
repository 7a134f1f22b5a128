"""Settings that change the graph of a family: each passes the built-in check, in all its scenarios."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from trt_spec.engines import ExportError
from trt_spec.export import export_bundle
from trt_spec.export.passes.quantise import Quantisation
from trt_spec.export.special import attending
from trt_spec.export.tracing.cache import Places

from ..engines.parity import assert_engine_agrees
from ..kit.families import tiny_checkpoint
from ..kit.models import YARN, tiny_gemma2, tiny_gpt2, tiny_llama

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("make", "config"),
    [
        pytest.param(tiny_llama, {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, id="llama3 rotary"),
        pytest.param(tiny_llama, {"rope_parameters": YARN, "num_key_value_heads": 4}, id="yarn rotary"),
        pytest.param(tiny_llama, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}, id="biases"),
        pytest.param(tiny_llama, {"head_dim": 24, "max_position_embeddings": 32}, id="odd head size, few positions"),
        pytest.param(tiny_gpt2, {"scale_attn_by_inverse_layer_idx": True, "n_inner": 48}, id="scaled by layer"),
        pytest.param(tiny_gpt2, {"scale_attn_weights": False, "activation_function": "relu"}, id="unscaled"),
        pytest.param(tiny_gpt2, {"tie_word_embeddings": False, "reorder_and_upcast_attn": True}, id="untied head"),
        pytest.param(tiny_gemma2, {"attn_logit_softcapping": None, "final_logit_softcapping": None}, id="no soft-caps"),
        pytest.param(tiny_gemma2, {"sliding_window": 40, "num_hidden_layers": 3}, id="window wider than a chunk"),
    ],
)
def test_variant_passes_the_built_in_check(tmp_path: Path, make: Callable[..., Path], config: dict[str, Any]) -> None:
    (target,) = export_bundle(make(tmp_path / "checkpoint", **config), tmp_path / "bundle").models
    assert target.entry.check["worst_error"] < 5e-5


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.2, 1.4, 1.5],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": 64,
}
LONGROPE_PHI3 = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}
LONGROPE_PHIMOE = {"rope_parameters": LONGROPE | {"short_mscale": 1.2, "long_mscale": 1.3}}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 6.0}
FALCON_RW = {
    "new_decoder_architecture": False,
    "multi_query": False,
    "num_kv_heads": 4,
    "alibi": True,
    "bias": True,
    "parallel_attn": False,
}
MPT_CLIPPED = {"n_heads": 6, "d_model": 48, "attn_config": {"clip_qkv": 1.0, "softmax_scale": 0.3}}
GEMMA4_E = {  # as Gemma 4 E2B: four of eight layers ask others
    "num_hidden_layers": 8,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2,
    "num_kv_shared_layers": 4,
    "final_logit_softcapping": 30.0,
    "use_double_wide_mlp": True,
    "use_bidirectional_attention": "vision",
}
GEMMA4_A = {  # as Gemma 4 26B-A4B
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
YARN_QWEN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("mistral", {"sliding_window": None}, id="mistral without a window"),
        pytest.param("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, id="qwen2 with a window"),
        pytest.param("qwen3", {"rope_parameters": YARN_QWEN}, id="qwen3 with yarn"),
        pytest.param("phi3", {"sliding_window": None}, id="phi3 without a window"),
        pytest.param("falcon", FALCON_RW, id="falcon with ALiBi, as Falcon-RW"),
        pytest.param("falcon", {"new_decoder_architecture": False}, id="falcon with one key head, as Falcon-7B"),
        pytest.param("falcon", {"num_ln_in_parallel_attn": 1}, id="falcon with one norm, as Falcon-11B"),
        pytest.param("gemma4_text", GEMMA4_E, id="gemma4 with layers that ask others"),
        pytest.param("gemma4_text", GEMMA4_A, id="gemma4 with experts and fewer global heads"),
        pytest.param("bloom", {"n_head": 6, "hidden_size": 48}, id="bloom with 6 heads"),
        pytest.param("mpt", MPT_CLIPPED, id="mpt with 6 heads, clipped and scaled"),
        pytest.param("gpt_bigcode", {"multi_query": False}, id="gpt_bigcode with keys for each head"),
        pytest.param("phi3", LONGROPE_PHI3, id="phi3 with longrope"),
        pytest.param("phimoe", LONGROPE_PHIMOE, id="phimoe with longrope"),
        pytest.param("internlm3", {"rope_parameters": DYNAMIC}, id="internlm3 with dynamic scaling"),
        pytest.param("hunyuan_v1_dense", {"rope_parameters": DYNAMIC | {"alpha": 1000}}, id="hunyuan with its alpha"),
        pytest.param("opt", {"do_layer_norm_before": False}, id="opt with norms behind"),
        pytest.param("gpt_neox", {"use_parallel_residual": False}, id="gpt_neox with layers in a row"),
        pytest.param("olmo2", {"attention_bias": True}, id="olmo2 with biases"),
        pytest.param("smollm3", {"no_rope_layers": [1, 0]}, id="smollm3 with a layer without positions"),
    ],
)
def test_variant_of_another_family_passes_the_built_in_check(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    (target,) = export_bundle(tiny_checkpoint(kind, tmp_path / "checkpoint", **settings), tmp_path / "bundle").models
    assert target.entry.check["worst_error"] < 2e-4


def test_biases_of_heads_that_share_keys_are_those_of_each_head_in_torch_too(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("falcon", tmp_path / "checkpoint", alibi=True)
    (target,) = export_bundle(checkpoint, tmp_path / "bundle").models
    assert (target.entry.contract.heads, target.entry.contract.states[0].shape[0]) == (4, 2)
    assert target.entry.check["worst_error"] < 5e-5
    assert_engine_agrees(tmp_path / "bundle")
    (target,) = export_bundle(checkpoint, tmp_path / "int8", weights=Quantisation("int8")).models
    assert target.fired["stack_heads"] == 2
    assert_engine_agrees(tmp_path / "int8")


@pytest.mark.parametrize(("kind", "settings"), [("bloom", {}), ("mpt", {}), ("falcon", FALCON_RW)])
def test_the_check_sees_biases_that_go_by_where_an_entry_lies(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    def places(places: Places, entries: int) -> Tensor:
        return torch.arange(entries).expand(places.start.shape[0], -1)

    checkpoint = tiny_checkpoint(kind, tmp_path / "checkpoint", **settings)
    with (
        patch.object(attending, "positions_of_entries", places),
        pytest.raises(ExportError, match=r"in the scenario '(tree|deep tree|tail)' a logit is off"),
    ):
        export_bundle(checkpoint, tmp_path / "bundle")


def test_what_a_family_does_to_longer_texts_is_left_out_and_the_user_told(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("phi3", tmp_path / "checkpoint", **LONGROPE_PHI3)
    report = export_bundle(checkpoint, tmp_path / "bundle")
    assert report.max_length == 64, "where transformers begins to use the long factors"
    assert report.notes == [
        f"{checkpoint} has 64 positions here: a text of more than 64 tokens turns its keys by other factors"
    ]
    checkpoint = tiny_checkpoint("doge", tmp_path / "doge", keep_window_size=48)
    report = export_bundle(checkpoint, tmp_path / "bundle")
    seen = f"{checkpoint} has 48 positions here: of a text of more than 48 tokens its layers see a choice alone"
    assert (report.max_length, report.notes) == (48, [seen])
    same = LONGROPE | {"long_factor": LONGROPE["short_factor"]}
    checkpoint = tiny_checkpoint("phi3", tmp_path / "same", **LONGROPE_PHI3 | {"rope_parameters": same})
    report = export_bundle(checkpoint, tmp_path / "bundle")
    assert (report.max_length, report.notes) == (256, [])
