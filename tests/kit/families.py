"""Tiny random checkpoints of every family that works, from their own configuration classes."""

from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .models import write_random

VOCAB = 64
SIZES = {
    "vocab_size": VOCAB,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "n_inner"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("initializer_range", "init_std"), 0.4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    "head_dim": 16,
    "rotary_dim": 8,
    "sliding_window": 8,
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_experts_per_tok": 2,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "query_pre_attn_scalar": 12,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
LATENT_FAMILIES = (
    "axk1",
    "bailing_hybrid",
    "deepseek_v2",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_linear",
    "minicpm3",
    "sarvam_mla",
    "youtu",
)
LATENT = {  # all sizes differ, so that none is taken for another
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 14,
}
# What they are made of others have as well, in every layer.
FORMS_OF_OTHERS = """
arcee axk1 cohere cohere2_moe cwm dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo gemma glm glm4
glm4_moe gpt-sw3 granite granitemoe granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hy_v3 internlm3 iquestcoder
jais2 laguna ministral ministral3 mistral mixtral nemotron olmo olmo2 olmo3 olmoe persimmon phi qwen2 qwen2_moe
qwen3 sarvam_mla sarvam_moe seed_oss smollm3 stablelm starcoder2 vaultgemma youtu
"""
SINGLE_STEPS_DIFFER = ("zamba2",)  # in transformers, which limits time steps from below in longer ones alone
LARGER_HEADS = {"hidden_size": 64}  # for which TensorRT has fused kernels
# Of recurrent layers; all sizes differ.
DELTA_RULE = {
    **LARGER_HEADS,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "initializer_range": 0.1,
}
DELTA_BY_CHANNEL = {
    **LATENT,
    **LARGER_HEADS,
    "layer_types": ["linear_attention", "full_attention"],
    "initializer_range": 0.1,
}
MAMBA2 = {
    **LARGER_HEADS,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), 6),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 2),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 16),
    "initializer_range": 0.1,
}
GEMMA3N = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB,
    "altup_num_inputs": 3,
    "laurel_rank": 6,
    "activation_sparsity_pattern": [0.6, 0.0, 0.6, 0.0],
    "pad_token_id": 0,
}
GEMMA4 = {  # the last two layers ask the two before them
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "global_head_dim": 24,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB,
}
OWN = {  # what single families need besides, or instead
    **dict.fromkeys(LATENT_FAMILIES, LATENT),
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "cohere_compass_text": {
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None},
    },
    "dots1": {"n_shared_experts": 1},
    "falcon": {"new_decoder_architecture": True},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": GEMMA3N,
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": GEMMA4,
    "gpt_neo": {"attention_types": [[["local", "global"], 1]], "window_size": 8},
    "helium": {"head_dim": 8},
    "llama4_text": {
        "num_hidden_layers": 4,
        "layer_types": None,
        "no_rope_layers": [1, 0, 1, 0],
        "attention_chunk_size": 16,
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 48,
        "floor_scale": 8,
        "attn_scale": 0.5,
    },
    "bailing_hybrid": DELTA_BY_CHANNEL | {"head_dim": 6},
    "kimi_linear": DELTA_BY_CHANNEL | {"linear_head_dim": 6, "linear_num_heads": 3},
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), DELTA_RULE),
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 128},
    "granitemoehybrid": MAMBA2 | {"layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": MAMBA2 | {"layer_types": ["linear_attention", "full_attention", "moe", "mlp"]},
    "mamba2": MAMBA2 | {"num_heads": 4, "head_dim": 32, "state_size": 6},
    "zamba2": MAMBA2
    | {  # two blocks take turns in three layers
        "num_hidden_layers": 5,
        "layers_block_type": ["hybrid", "linear_attention", "hybrid", "hybrid", "linear_attention"],
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 3,
        "use_mem_rope": True,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    "lfm2": LARGER_HEADS | {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": LARGER_HEADS | {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": LARGER_HEADS | {"layer_types": ["conv", "sliding_attention", "full_attention"], "num_hidden_layers": 3},
    "minimax": LARGER_HEADS | {"layer_types": ["linear_attention", "full_attention"], "initializer_range": 0.1},
    "modernbert-decoder": {"pad_token_id": 0, "local_attention": 16},
}


def tiny_checkpoint(kind: str, path: Path, **settings: Any) -> Path:
    """Two layers of a family, of which the first slides in those that can; its own defaults decide the rest."""
    known = CONFIG_MAPPING[kind]
    fields = set(known().to_dict()) | set(known.attribute_map)
    if "sliding_window" not in fields:
        fields.discard("layer_types")
    config = known(**{name: value for name, value in SIZES.items() if name in fields} | OWN.get(kind, {}) | settings)
    return write_random(path, config, VOCAB)
