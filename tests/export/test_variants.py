"""Settings of the three families that change the graph: each passes the built-in check, in all its scenarios."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trt_spec.export import export_bundle

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
