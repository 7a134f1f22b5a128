"""Tiny random checkpoints that read more than text."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoModelForMultimodalLM

from .families import DELTA_RULE, GEMMA4
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
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 2),
    "deepstack_visual_indexes": [0],
}
POSITIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}  # of images: height and width, too


def whole_of(kind: str, path: Path, **of_text: Any) -> Any:
    """Write a tiny random checkpoint that reads more than text, and return its model."""
    known = CONFIG_MAPPING[kind]
    own = known().get_text_config()
    text = type(own)(**TEXT | (GEMMA4 | {"pad_token_id": 0} if kind.startswith("gemma4") else {})).to_dict()
    if kind.startswith("qwen3_5"):
        text |= DELTA_RULE
    if kind.startswith(("qwen2_vl", "qwen2_5_vl")):
        text["rope_parameters"] = POSITIONS
    config = known(text_config=text | {name: value for name, value in of_text.items() if name in text})
    for part in ("vision_config", "audio_config"):
        for name, value in SMALL.items():
            if hasattr(getattr(config, part, None), name):
                setattr(getattr(config, part), name, value)
    maker = AutoModelForMultimodalLM if kind == "voxtral" else AutoModelForImageTextToText
    torch.manual_seed(0)
    model = maker.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(path)
    write_tokenizer(path, VOCAB)
    return model.language_model if kind == "llama4" else model  # whose whole fails on text in transformers 5.24
