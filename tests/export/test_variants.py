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


YARN_QWEN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("mistral", {"sliding_window": None}, id="mistral without a window"),
        pytest.param("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, id="qwen2 with a window"),
        pytest.param("qwen3", {"rope_parameters": YARN_QWEN}, id="qwen3 with yarn"),
        pytest.param("phi3", {"sliding_window": None}, id="phi3 without a window"),
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
