"""Find the text model in a checkpoint that reads more than text: its configuration, and the names of its weights."""

import re
from typing import Any

# Types whose text model attends causally to text, by the type in config.json. The tests export and compare each.
READS_MORE = (
    "aria",
    "aya_vision",
    "cohere2_vision",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "exaone4_5",
    "fuyu",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma4_unified",
    "glm46v",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "glmasr",
    "got_ocr2",
    "granite_speech",
    "idefics2",
    "idefics3",
    "internvl",
    "kimi_k25",
    "lfm2_vl",
    "lighton_ocr",
    "llama4",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "mistral3",
    "ovis2",
    "paddleocr_vl",
    "qianfan_ocr",
    "qwen2_5_omni_thinker",
    "qwen2_5_vl",
    "qwen2_audio",
    "qwen2_vl",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_asr",
    "qwen3_vl",
    "qwen3_vl_moe",
    "smolvlm",
    "video_llama_3",
    "video_llava",
    "vipllava",
    "voxtral",
)
SAME_ON_TEXT = {  # text models that are another known one, as long as no image moves their positions apart
    "glm4v_moe_text": "glm4_moe",
    "glm4v_text": "glm4",
    "glm_ocr_text": "glm4",
    "paddleocr_vl_text": "llama",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
UNSAID = {  # what these do without saying so
    "glm4v_text": {"partial_rotary_factor": 1.0},
    "glm_ocr_text": {"attention_bias": False},
    "paddleocr_vl_text": {"attention_bias": False, "mlp_bias": False},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
UNSCALED = ("aya_vision", "cohere2_vision")  # transformers' whole leaves out by what the text model scales logits
WEIGHT_NAMES = {  # from how they are stored, now and by older versions of transformers, to those of the text model
    r"^language_model\.lm_head\.": "lm_head.",
    r"^(model\.)?(language_model|text_model)\.(model\.)?(encoder\.)?": "model.",
    r"^model\.blocks\.": "model.layers.",
}
# Of weights that read the rest.
OTHERS = re.compile(
    r"vision|visual|image|video|audio|aligner|projector|connector|multi_modal|mlp_AR|^encoder\.|^mlp1\."
)


def text_config_of(config: Any) -> Any:
    """Return the configuration of the text model as one by itself."""
    from transformers import CONFIG_MAPPING

    text = config.get_text_config()
    kind = SAME_ON_TEXT.get(text.model_type)
    if kind is not None:
        fields = text.to_dict() | UNSAID.get(text.model_type, {})
        positions = {name: value for name, value in fields["rope_parameters"].items() if not name.startswith("mrope")}
        turned = text.rope_parameters
        text = CONFIG_MAPPING[kind].from_dict(fields | {"model_type": kind, "rope_parameters": positions})
        text.image_turns = {name: turned[name] for name in turned if name.startswith("mrope")}
    for name in ("eos_token_id", "bos_token_id", "tie_word_embeddings"):
        if getattr(config, name, None) is not None and name in config.to_dict():
            setattr(text, name, getattr(config, name))
    return text
