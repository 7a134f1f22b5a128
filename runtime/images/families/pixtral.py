"""Pixtral and Mistral Small 3: one tile of the image's shape, with a token at the end of each row of patches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..picture import Picture
from ..pixels import Scaling, cropped

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Pixtral:
    """Reads an image as PixtralProcessor does."""

    scaling: Scaling
    most: tuple[int, int] | None  # height and width
    crop: tuple[int, int] | None
    patch: int  # as merged
    image_token: int
    row_end: int
    end: int

    def read(self, image: Image) -> Picture:
        if self.most is not None:
            image = self.scaling.resized(image, *self._fitting(image.height, image.width, *self.most))
        if self.crop is not None:
            image = cropped(image, *self.crop)
        rows, columns = image.height // self.patch, image.width // self.patch
        if not rows * columns:
            raise ValueError(f"it is smaller than a patch, which has {self.patch} x {self.patch}")
        tokens = ((self.image_token,) * columns + (self.row_end,)) * rows
        count = rows * columns
        return Picture({"pixels": self.scaling.numbers(image)[None]}, (*tokens[:-1], self.end), (1, 1, count))

    def _fitting(self, height: int, width: int, most_height: int, most_width: int) -> tuple[int, int]:
        """Return the size that the most allow, rounded up to whole patches."""
        over = max(height / most_height, width / most_width)
        if over > 1:
            height, width = math.floor(height / over), math.floor(width / over)
        return -(-height // self.patch) * self.patch, -(-width // self.patch) * self.patch
