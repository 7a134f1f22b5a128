"""Tiny random checkpoints that read more than text."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM

from .families import DELTA_RULE, GEMMA3N, GEMMA4
from .models import write_tokenizer

VOCAB = 64
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "eos_token_id": 1,
    "bos_token_id": 0,
    "pad_token_id": None,
}
SMALL = {  # sizes of what reads images and sounds, by the names that one or the other has for them
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 2),
    "deepstack_visual_indexes": [0],
}
POSITIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}  # of images: height and width, too


OF_HALF_A_HEAD = POSITIONS | {"mrope_section": [0, 1, 1], "partial_rotary_factor": 0.5}
LATENT = {  # attention and experts of Kimi K2.5
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
}
HEARS = ("glmasr", "granite_speech", "qwen2_audio", "qwen3_asr", "voxtral")


def whole_of(kind: str, path: Path, **of_text: Any) -> Any:
    """Write a tiny random checkpoint that reads more than text, and return its model."""
    known = CONFIG_MAPPING[kind]
    own = known().get_text_config()
    more = GEMMA4 | {"pad_token_id": 0} if kind.startswith("gemma4") else GEMMA3N if kind == "gemma3n" else {}
    text = type(own)(**TEXT | more).to_dict()
    if kind.startswith("qwen3_5"):
        text |= DELTA_RULE
    text |= {"kimi_k25": LATENT, "fuyu": {"num_key_value_heads": 4}}.get(kind, {})
    if kind in ("glm4v_moe", "glm_ocr"):
        text["rope_parameters"] = OF_HALF_A_HEAD
    elif kind.startswith(("qwen2_vl", "qwen2_5_", "glm4v", "glm46v", "paddleocr")):
        text["rope_parameters"] = POSITIONS
    config = known(text_config=text | {name: value for name, value in of_text.items() if name in text})
    if kind == "qwen2_5_omni_thinker":
        config.vision_start_token_id = VOCAB  # which its `generate` looks for
    for part in ("vision_config", "audio_config", "encoder_config"):
        for name, value in SMALL.items():
            if hasattr(getattr(config, part, None), name):
                setattr(getattr(config, part), name, value)
    if kind == "gemma3n":
        return _without_eyes(config, path)
    maker = AutoModelForMultimodalLM if kind in HEARS else AutoModelForImageTextToText
    torch.manual_seed(0)
    model = maker.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(path)
    write_tokenizer(path, VOCAB)
    return model.language_model if kind == "llama4" else model  # whose whole fails on text in transformers 5.24


def _without_eyes(config: Any, path: Path) -> Any:
    """Write the text model as a part of a whole whose eyes are timm's, which is not installed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config.text_config, dtype=torch.float32).eval()
    parts = {name: weight for name, weight in model.state_dict().items() if name != "lm_head.weight"}
    stored = {f"model.language_model.{name.removeprefix('model.')}": weight for name, weight in parts.items()}
    stored["model.vision_tower.timm_model.conv_stem.weight"] = torch.ones(2)
    config.architectures = ["Gemma3nForConditionalGeneration"]
    config.save_pretrained(path)
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    write_tokenizer(path, VOCAB)
    return model
