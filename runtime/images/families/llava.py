"""LLaVA: one tile of a fixed size, and a token for each of its patches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..picture import Picture
from ..pixels import Scaling, cropped, refuse_large

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Llava:
    """Reads an image as LlavaProcessor does with the image processors of CLIP, SigLIP and LLaVA."""

    scaling: Scaling
    square: bool  # pad to a square with the mean colour first
    shortest: int | None  # resize to this shorter side
    size: tuple[int, int] | None  # or to this height and width
    crop: tuple[int, int] | None
    patch: int
    image_token: int
    more: int  # tokens beside those of patches

    def read(self, image: Image) -> Picture:
        if self.square:
            image = _squared(image, tuple(int(each * 255) for each in self.scaling.mean or (0, 0, 0)))
        if self.shortest is not None:
            short, long = sorted(image.size)
            longest = int(self.shortest * long / short)
            tall = image.width <= image.height
            height, width = (longest, self.shortest) if tall else (self.shortest, longest)
            image = self.scaling.resized(image, height, width)
        elif self.size is not None:
            image = self.scaling.resized(image, *self.size)
        if self.crop is not None:
            image = cropped(image, *self.crop)
        count = (image.height // self.patch) * (image.width // self.patch) + self.more
        pixels = self.scaling.numbers(image)[None]
        return Picture({"pixels": pixels}, (self.image_token,) * count, (1, 1, count))


def _squared(image: Image, colour: tuple[int, ...]) -> Image:
    from PIL import Image as images

    side = max(image.size)
    refuse_large(image, side, side)
    square = images.new("RGB", (side, side), colour)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square
