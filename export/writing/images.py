"""Keeps in a bundle how a checkpoint's processor reads images: one small file of settings, all defaults filled in."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...engines import ExportError
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.reading import read_object
from .image_processor import Processor, load_pixels, scaling_of

SETTINGS = "images.json"
MOST_A_SIDE = 4096  # pixels, to which Idefics 3 makes any image smaller
CONFIGS = (
    "processor_config.json",
    "preprocessor_config.json",
    "tokenizer_config.json",
)  # in which a processor is named


def image_settings(checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return what `runtime.images.ImageReader` needs of a checkpoint's processor, or refuse the processor by name."""
    name, path = checkpoint.name, checkpoint.path
    configs = [read_object(name, path / name) if (path / name).is_file() else {} for name in CONFIGS]
    named = next((str(one["processor_class"]) for one in configs if one.get("processor_class")), "")
    if named not in PROCESSORS:
        raise ExportError(
            f"checkpoint {name} reads images by {named or 'a processor of no name'}, expected {', '.join(PROCESSORS)}"
        )
    pixels = load_pixels(name, path)
    made, able = PROCESSORS[named]
    kind = type(pixels).__name__.removesuffix("Pil")
    if kind not in able:
        raise ExportError(f"checkpoint {name} reads images by {kind}, expected {', '.join(able)}")
    return made(Processor(name, tokenizer, configs[0], configs[2], pixels))


def write_image_settings(settings: Mapping[str, Any], bundle: Path) -> None:
    (bundle / SETTINGS).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")


def _kept(
    family: str, token: tuple[str, int], pixels: Any, around: tuple[str, str] = ("", ""), **settings: Any
) -> dict[str, Any]:
    placeholder, number = token
    shared = {"family": family, "image_token": number, "placeholder": placeholder, "around": around}
    return shared | {"settings": {"scaling": scaling_of(pixels)} | settings}


def _llava(processor: Processor) -> dict[str, Any]:
    pixels, size = processor.pixels, processor.pixels.size
    if pixels.do_resize and processor.size() is None and (not size.shortest_edge or size.longest_edge):
        raise processor.refuse("size", "shortest_edge, or height and width")
    square = bool(getattr(pixels, "do_pad", None))
    if square and "Llava" not in type(pixels).__name__:
        raise processor.refuse("do_pad", "false")
    token = processor.token("image_token", processor.own.get("image_token", "<image>"))
    dropped = processor.own.get("vision_feature_select_strategy") == "default"
    return _kept(
        "llava",
        token,
        pixels,
        square=square,
        shortest=size.shortest_edge if pixels.do_resize else None,
        size=processor.size() if pixels.do_resize else None,
        crop=processor.size("crop_size") if pixels.do_center_crop else None,
        patch=processor.count("patch_size"),
        image_token=token[1],
        more=processor.count("num_additional_image_tokens", 0) - dropped,
    )


def _gemma3(processor: Processor) -> dict[str, Any]:
    pixels = processor.pixels
    if pixels.do_resize and processor.size() is None:
        raise processor.refuse("size", "height and width")
    begin, end = processor.token("boi_token", "<start_of_image>"), processor.token("eoi_token", "<end_of_image>")
    return _kept(
        "gemma3",
        begin,
        pixels,
        ("\n\n", "\n\n"),
        size=processor.size() if pixels.do_resize else None,
        begin=begin[1],
        soft=processor.token("image_token", "<image_soft_token>")[1],
        end=end[1],
        count=processor.count("image_seq_length", 256),
        crops=_crops(processor) if pixels.do_pan_and_scan else None,
        lead="Here is the original image ",
        then=processor.between(end[0], "\n\n and here are some crops to help you see better \n\n", begin[0]),
        between=processor.between(end[0], "\n\n \n\n", begin[0]),
    )


def _crops(processor: Processor) -> list[float]:
    """Return how the crops of an image are chosen, with the defaults of Gemma3Processor."""
    usual = {
        "pan_and_scan_min_crop_size": 256,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    }
    found = []
    for name, value in usual.items():
        own = getattr(processor.pixels, name)
        found.append(value if own is None else type(value)(own))
        if not found[-1] > 0:
            raise processor.refuse(name, "more than 0")
    return found


def _qwen(processor: Processor) -> dict[str, Any]:
    pixels, size = processor.pixels, processor.pixels.size
    token = processor.token("image_token", "<|image_pad|>")
    return _kept(
        "qwen",
        token,
        pixels,
        bounds=(size.shortest_edge, size.longest_edge) if pixels.do_resize else None,
        patch=pixels.patch_size,
        frames=pixels.temporal_patch_size,
        merge=pixels.merge_size,
        image_token=token[1],
    )


def _pixtral(processor: Processor) -> dict[str, Any]:
    pixels, own = processor.pixels, processor.own
    longest = pixels.size.longest_edge
    token = processor.token("", own.get("image_token", "[IMG]"))
    return _kept(
        "pixtral",
        token,
        pixels,
        most=((longest, longest) if longest else processor.size()) if pixels.do_resize else None,
        crop=processor.size("crop_size") if pixels.do_center_crop else None,
        patch=processor.count("patch_size", 16) * processor.count("spatial_merge_size", 1),
        image_token=token[1],
        row_end=processor.token("", own.get("image_break_token", "[IMG_BREAK]"))[1],
        end=processor.token("", own.get("image_end_token", "[IMG_END]"))[1],
    )


def _idefics3(processor: Processor) -> dict[str, Any]:
    pixels, longest = processor.pixels, processor.pixels.size.longest_edge
    image = processor.token("image_token", "<image>")
    fence = processor.token("fake_image_token", "<fake_token_around_image>")
    whole = processor.token("global_image_token", "<global-img>")[0]
    tile, side = pixels.max_image_size["longest_edge"], MOST_A_SIDE
    if pixels.do_resize:
        side = min(max(tile, *(processor.size() or (longest,))), MOST_A_SIDE)
    most = -(-(side + 1) // tile) if pixels.do_image_splitting else 0  # a side may be rounded up to an even number
    places = [
        [processor.between(fence[0], f"<row_{row + 1}_col_{column + 1}>", image[0]) for column in range(most)]
        for row in range(most)
    ]
    return _kept(
        "idefics3",
        image,
        pixels,
        longest=longest if pixels.do_resize else None,
        size=processor.size() if pixels.do_resize and not longest else None,
        split=bool(pixels.do_image_splitting),
        tile=tile,
        image_token=image[1],
        count=processor.count("image_seq_len", 169),
        fence=fence[1],
        whole=processor.between(fence[0], whole, image[0]),
        places=places or [[]],
        row_end=processor.between(image[0], "\n", fence[0]),
        last_row_end=processor.between(image[0], "\n\n", fence[0]),
    )


Made = tuple[Callable[[Processor], dict[str, Any]], tuple[str, ...]]
PROCESSORS: Mapping[str, Made] = {  # and the image processors that each may have
    "LlavaProcessor": (_llava, ("CLIPImageProcessor", "SiglipImageProcessor", "LlavaImageProcessor")),
    "Gemma3Processor": (_gemma3, ("Gemma3ImageProcessor",)),
    "Qwen2_5_VLProcessor": (_qwen, ("Qwen2VLImageProcessor",)),
    "Qwen3VLProcessor": (_qwen, ("Qwen2VLImageProcessor",)),
    "PixtralProcessor": (_pixtral, ("PixtralImageProcessor",)),
    "Idefics3Processor": (_idefics3, ("Idefics3ImageProcessor", "SmolVLMImageProcessor")),
    "SmolVLMProcessor": (_idefics3, ("SmolVLMImageProcessor", "Idefics3ImageProcessor")),
}
