"""Settings that change the graph of a family: each passes the built-in check, in all its scenarios."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trt_spec.export import export_bundle

from ..families import tiny_checkpoint
from ..models import YARN, tiny_gemma2, tiny_gpt2, tiny_llama

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
YARN_QWEN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("mistral", {"sliding_window": None}, id="mistral without a window"),
        pytest.param("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, id="qwen2 with a window"),
        pytest.param("qwen3", {"rope_parameters": YARN_QWEN}, id="qwen3 with yarn"),
        pytest.param("phi3", {"sliding_window": None}, id="phi3 without a window"),
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


def test_rotary_factors_for_longer_texts_are_left_out_and_the_user_told(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("phi3", tmp_path / "checkpoint", **LONGROPE_PHI3)
    report = export_bundle(checkpoint, tmp_path / "bundle")
    assert report.max_length == 64, "where transformers begins to use the long factors"
    assert report.notes == [
        f"{checkpoint} has 64 positions here: a text of more than 64 tokens turns its keys by other factors"
    ]
    same = LONGROPE | {"long_factor": LONGROPE["short_factor"]}
    checkpoint = tiny_checkpoint("phi3", tmp_path / "same", **LONGROPE_PHI3 | {"rope_parameters": same})
    report = export_bundle(checkpoint, tmp_path / "bundle")
    assert (report.max_length, report.notes) == (256, [])
