"""The families whose images can be read: how each is traced, and what the graphs that read them promise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...engines import AXES, WHOLE_IMAGES, Contract, TensorSpec, VisionContract
from .idefics3 import Idefics3
from .llava import Llava
from .pixtral import LlavaPixtral, Pixtral
from .qwen import Qwen3, Qwen25
from .tower import GRID, PIXELS, Given, Tower


@dataclass(frozen=True)
class Family:
    """How the images of a family are read."""

    tower: type[Tower]
    given: Callable[[Any], tuple[TensorSpec, ...]]  # by the configuration of the whole
    example: Callable[[Any], Given]  # an image as transformers' whole takes it
    of_whole: Callable[[Given], Given]  # what the graph is given of that
    capabilities: tuple[str, ...] = ()  # that the text model has then
    eyes: tuple[str, ...] = ()  # the types of vision towers, if the family has one of several


def _tiles(config: Any) -> tuple[TensorSpec, ...]:
    side = config.vision_config.image_size
    return (TensorSpec(PIXELS, "float32", ("tiles", 3, side, side)),)


def _one_tile(config: Any) -> Given:
    side = config.vision_config.image_size
    return {"pixel_values": _noise(1, 3, side, side)}


def _pixels(example: Given) -> Given:
    return {PIXELS: example["pixel_values"]}


def _tiles_of_a_batch(config: Any) -> Given:
    side = config.vision_config.image_size
    return {"pixel_values": _noise(1, 3, 3, side, side)}


def _pixels_of_a_batch(example: Given) -> Given:
    return {PIXELS: example["pixel_values"][0]}


def _any_size(config: Any) -> tuple[TensorSpec, ...]:
    return (TensorSpec(PIXELS, "float32", (1, 3, "image_height", "image_width")),)


def _tall_image(config: Any) -> Given:
    side = config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1)
    return {"pixel_values": _noise(1, 3, 5 * side, 3 * side), "image_sizes": torch.tensor([[5 * side, 3 * side]])}


def _patches(config: Any) -> tuple[TensorSpec, ...]:
    own = config.vision_config
    size = own.in_channels * own.temporal_patch_size * own.patch_size**2
    return TensorSpec(PIXELS, "float32", ("patches", size)), TensorSpec(GRID, "int64", (3,))


def _some_patches(config: Any) -> Given:
    merged = config.vision_config.spatial_merge_size
    grid = torch.tensor([[1, 3 * merged, 5 * merged]])
    return {"pixel_values": _noise(int(grid.prod()), _patches(config)[0].shape[1]), "image_grid_thw": grid}


def _pixels_and_grid(example: Given) -> Given:
    return {PIXELS: example["pixel_values"], GRID: example["image_grid_thw"][0]}


def _noise(*shape: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


FAMILIES: Mapping[str, Family] = {  # by the type in config.json, or that and the vision tower's
    "gemma3": Family(Tower, _tiles, _one_tile, _pixels, (WHOLE_IMAGES,)),
    "idefics3": Family(Idefics3, _tiles, _tiles_of_a_batch, _pixels_of_a_batch),
    "llava": Family(Llava, _tiles, _one_tile, _pixels, eyes=("clip_vision_model", "siglip_vision_model", "pixtral")),
    "llava-pixtral": Family(LlavaPixtral, _any_size, _tall_image, _pixels),
    "mistral3": Family(Pixtral, _any_size, _tall_image, _pixels),
    "qwen2_5_vl": Family(Qwen25, _patches, _some_patches, _pixels_and_grid, (AXES,)),
    "qwen3_vl": Family(Qwen3, _patches, _some_patches, _pixels_and_grid, (AXES,)),
    "smolvlm": Family(Idefics3, _tiles, _tiles_of_a_batch, _pixels_of_a_batch),
}


def family_of(config: Any) -> Family:
    """Return how images are read by the whole of this configuration, whose type is in the table."""
    kind = config.model_type
    return FAMILIES.get(f"{kind}-{config.vision_config.model_type}", FAMILIES[kind])


def seeing_contract(config: Any, text: Contract) -> Contract:
    """Return the contract of a text model that reads entries of images beside its tokens."""
    added = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
    seeing = text.with_images((1 + added) * config.get_text_config().hidden_size)
    return replace(seeing, capabilities=(*text.capabilities, *family_of(config).capabilities))


def vision_contract(config: Any, text: Contract) -> VisionContract:
    """Return the contract of the vision graph of a family, whose entries the text model reads."""
    return VisionContract(family_of(config).given(config), text.image_size, text.dtype, config.image_token_id)
