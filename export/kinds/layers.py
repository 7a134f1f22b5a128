"""The layers of heads: those of transformers, and what configurations may say of them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from ...engines import ExportError
from ...engines.errors import one_line
from ..families.shape import refuse_moving_positions


@dataclass(frozen=True)
class LayerClasses:
    layer: Any
    norm: Any
    rotary: Any


LAYERS = {
    "llama": LayerClasses(
        modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaRotaryEmbedding
    ),
    "qwen3": LayerClasses(
        modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3RotaryEmbedding
    ),
}
LAYER_FIELDS = {  # of the layers, which transformers reads
    "attention_bias", "attention_dropout", "head_dim", "hidden_act", "hidden_size", "initializer_range",
    "intermediate_size", "max_position_embeddings", "mlp_bias", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "pretraining_tp", "rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta",
    "vocab_size",
}  # fmt: skip
MEANINGLESS = {  # here; the code that auto_map names is never run
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "layer_types",
    "model_type", "pad_token_id", "sliding_window", "tie_word_embeddings", "torch_dtype", "transformers_version",
    "use_cache", "use_sliding_window", "max_window_layers", "has_no_defaults_at_init", "is_decoder",
    "target_model_type", "target_vocab_size",
}  # fmt: skip


def layer_config(name: str, fields: Mapping[str, Any], vocab: int) -> Any:
    """Return the configuration of the layers that these fields describe, as transformers has it."""
    kind = str(fields.get("model_type", "llama"))
    if kind not in LAYERS:
        raise ExportError(f"head {name} has layers of the type {kind!r}, expected {' or '.join(LAYERS)}")
    if "sliding_attention" in (fields.get("layer_types") or ()):
        raise ExportError(f"head {name} has layers that see a sliding window, which this version cannot run")
    known = {key: value for key, value in fields.items() if key in LAYER_FIELDS and value is not None}
    known["vocab_size"] = vocab
    if "head_dim" not in known and "hidden_size" in known and "num_attention_heads" in known:
        known["head_dim"] = known["hidden_size"] // known["num_attention_heads"]
    known.setdefault("num_hidden_layers", 1)
    try:
        config = AutoConfig.for_model(kind, **known, attn_implementation="eager")
    except Exception as error:  # each configuration class raises its own
        raise ExportError(f"config.json of head {name} is refused by transformers: {one_line(error)}") from error
    config.tie_word_embeddings = False
    refuse_moving_positions(name, config)
    return config
