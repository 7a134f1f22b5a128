"""Qwen2-VL to Qwen3-VL: patches of an image of nearly its own size, those that are merged next to each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ....engines import RequestError
from ..picture import Picture
from ..pixels import Scaling

if TYPE_CHECKING:
    from PIL.Image import Image

LONGEST_TO_SHORTEST = 200


@dataclass(frozen=True)
class Qwen:
    """Reads an image as Qwen2_5_VLProcessor and Qwen3VLProcessor do: as one frame, which is repeated."""

    scaling: Scaling
    bounds: tuple[int, int] | None  # the fewest and the most pixels
    patch: int
    frames: int  # in a patch
    merge: int  # patches a side
    image_token: int

    def read(self, image: Image) -> Picture:
        if self.bounds is not None:
            image = self.scaling.resized(image, *self._fitting(image.height, image.width))
        rows, columns = image.height // self.patch, image.width // self.patch
        merged = rows // self.merge, columns // self.merge
        patches = self.scaling.numbers(image).reshape(
            3, merged[0], self.merge, self.patch, merged[1], self.merge, self.patch
        )
        patches = patches.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]  # rows, columns, those merged, colours
        patches = np.broadcast_to(patches, (*patches.shape[:5], self.frames, *patches.shape[6:]))
        inputs = {
            "pixels": patches.reshape(rows * columns, -1),
            "grid": np.array([1, rows, columns], np.int64),
        }
        return Picture(inputs, (self.image_token,) * (merged[0] * merged[1]), (1, *merged))

    def _fitting(self, height: int, width: int) -> tuple[int, int]:
        """Return a size of whole merged patches, nearly in the image's shape, and within the bounds of pixels."""
        assert self.bounds is not None
        (fewest, most), side = self.bounds, self.patch * self.merge
        if max(height, width) / min(height, width) > LONGEST_TO_SHORTEST:
            raise RequestError(
                f"an image has {width:,} x {height:,} pixels, expected a side to be at most {LONGEST_TO_SHORTEST} "
                "times the other; crop it",
                "images",
            )
        fitting = [round(each / side) * side for each in (height, width)]
        if fitting[0] * fitting[1] > most:
            over = math.sqrt(height * width / most)
            fitting = [max(side, math.floor(each / over / side) * side) for each in (height, width)]
        elif fitting[0] * fitting[1] < fewest:
            under = math.sqrt(fewest / (height * width))
            fitting = [math.ceil(each * under / side) * side for each in (height, width)]
        return fitting[0], fitting[1]
