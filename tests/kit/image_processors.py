"""Checkpoints' files that say how images are read, as published ones have them but smaller, and a tokenizer for all."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trt_spec.export.writing.images import image_settings, write_image_settings
from trt_spec.runtime.images.reader import ImageReader

CLIP: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
}
HALVES: dict[str, Any] = CLIP | {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
SQUARE = {"height": 28, "width": 28}
QWEN = {"temporal_patch_size": 2, "merge_size": 2, "image_processor_type": "Qwen2VLImageProcessor"}
TILES = {"do_image_splitting": True, "do_pad": True, "resample": 1, "size": {"longest_edge": 64}}
TILES |= {"max_image_size": {"longest_edge": 16}}
LLAVA = {"processor_class": "LlavaProcessor", "patch_size": 7, "image_token": "<image>"}
BOXED = {"do_center_crop": True, "size": {"shortest_edge": 28}, "crop_size": SQUARE}
CROPS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 20,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}
# For each: the processor's own settings, and those of what makes pixels.
PROCESSORS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": (
        LLAVA | {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"},
        CLIP | BOXED | {"image_processor_type": "CLIPImageProcessor"},
    ),
    "llava-siglip": (
        LLAVA | {"vision_feature_select_strategy": "full"},
        HALVES | {"size": SQUARE, "image_processor_type": "SiglipImageProcessor"},
    ),
    "llava-square": (
        LLAVA | {"num_additional_image_tokens": 1, "vision_feature_select_strategy": "full"},
        CLIP | BOXED | {"do_pad": True, "image_processor_type": "LlavaImageProcessor"},
    ),
    "gemma3": (
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        HALVES
        | {"size": SQUARE, "resample": 2, "do_pan_and_scan": None, "image_processor_type": "Gemma3ImageProcessor"},
    ),
    "gemma3-crops": (
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
        HALVES | CROPS | {"size": SQUARE, "resample": 2, "image_processor_type": "Gemma3ImageProcessor"},
    ),
    "qwen2_5_vl": (
        {"processor_class": "Qwen2_5_VLProcessor"},
        CLIP | QWEN | {"patch_size": 14, "min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 12},
    ),
    "qwen3_vl": (
        {"processor_class": "Qwen3VLProcessor"},
        HALVES | QWEN | {"patch_size": 16, "size": {"shortest_edge": 32 * 32 * 2, "longest_edge": 32 * 32 * 12}},
    ),
    "mistral3": (
        {"processor_class": "PixtralProcessor", "patch_size": 7, "spatial_merge_size": 2},
        CLIP
        | {"patch_size": {"height": 7, "width": 7}, "size": {"longest_edge": 70}}
        | {"image_processor_type": "PixtralImageProcessor"},
    ),
    "llava-pixtral": (
        {"processor_class": "PixtralProcessor", "patch_size": 7},
        CLIP
        | {"patch_size": {"height": 7, "width": 7}, "size": {"longest_edge": 42}}
        | {"image_processor_type": "PixtralImageProcessor"},
    ),
    "idefics3": (
        {"processor_class": "Idefics3Processor", "image_seq_len": 4},
        HALVES | TILES | {"image_processor_type": "Idefics3ImageProcessor"},
    ),
    "smolvlm": (
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        HALVES | TILES | {"image_processor_type": "SmolVLMImageProcessor"},
    ),
    "smolvlm-whole": (
        {"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        HALVES | TILES | {"do_image_splitting": False, "image_processor_type": "SmolVLMImageProcessor"},
    ),
}
GEMMA_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
SPECIAL = [
    "<s>",
    "</s>",
    "<image>",
    *GEMMA_TOKENS.values(),
    "<|image_pad|>",
    "[IMG]",
    "[IMG_BREAK]",
    "[IMG_END]",
    "<fake_token_around_image>",
    "<global-img>",
    "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),  # a fifth is spelled out
]


def tokenizer() -> Tokenizer:
    """A token for each byte, and for two and three newlines: what surrounds an image changes how text is read."""
    symbols = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "ĊĊĊ"]
    merges = [("Ċ", "Ċ"), ("ĊĊ", "Ċ")]
    made = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(symbols)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return made


def write_processor(name: str, folder: Path, **changed: Any) -> Path:
    """Write the files of one of the processors, with some settings of what makes pixels changed."""
    own, pixels = PROCESSORS[name]
    tokens = GEMMA_TOKENS if name.startswith("gemma3") else {}
    files = {"processor_config": own, "preprocessor_config": pixels | changed, "tokenizer_config": tokens}
    for file, settings in files.items():
        (folder / f"{file}.json").write_text(json.dumps(settings), encoding="utf-8")
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def whole_processor(name: str, folder: Path) -> Any:
    """Return transformers' whole processor, or None where it cannot be made without torchvision."""
    from transformers import AutoImageProcessor, PreTrainedTokenizerFast
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
    from transformers.models.llava.processing_llava import LlavaProcessor

    own, made = PROCESSORS[name][0], PreTrainedTokenizerFast(tokenizer_object=tokenizer())
    settings = {key: value for key, value in own.items() if key != "processor_class"}
    pixels = AutoImageProcessor.from_pretrained(folder, backend="pil")
    match own["processor_class"]:
        case "LlavaProcessor":
            return LlavaProcessor(pixels, made, **settings)
        case "Gemma3Processor":
            named = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), extra_special_tokens=GEMMA_TOKENS)
            return Gemma3Processor(pixels, named, **settings)
        case "Idefics3Processor":
            return Idefics3Processor(pixels, made, **settings)
    return None


def reader_of(folder: Path) -> ImageReader:
    """Return what reads images as the processor in a folder, by the settings that an export keeps."""
    write_image_settings(image_settings(SimpleNamespace(name="checkpoint", path=folder), tokenizer()), folder)
    return ImageReader.open(folder)
