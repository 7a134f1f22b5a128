"""What all families do with pixels: resize, crop, scale and normalise, rounded as transformers rounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...engines import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 64 * 10**6  # of an image, as it comes and as it is read


def refuse_large(image: Image, height: int, width: int) -> None:
    """Refuse an image that is very long and narrow before it is read at a size that is not."""
    if not 0 < height * width <= MOST_PIXELS:
        raise RequestError(
            f"an image of {image.width:,} x {image.height:,} pixels would be read at {width:,} x {height:,}, "
            f"expected 1 to {MOST_PIXELS:,} pixels in all; crop it",
            "images",
        )


@dataclass(frozen=True)
class Scaling:
    """How bytes become numbers, and which filter resizes: what each family's settings have."""

    resample: int  # Pillow's number of a filter
    factor: float | None  # None leaves the bytes as they are
    mean: tuple[float, ...] | None  # None: they are not normalised
    std: tuple[float, ...] | None

    def resized(self, image: Image, height: int, width: int) -> Image:
        refuse_large(image, height, width)
        return image.resize((width, height), resample=self.resample)

    def numbers(self, image: Image) -> np.ndarray:
        """Return the numbers of an image [3, height, width]."""
        found = np.asarray(image)  # [height, width, 3]
        wide = found if self.factor is None else found * np.float64(self.factor)
        scaled: np.ndarray = wide.astype(np.float32)
        if self.mean is not None and self.std is not None:
            scaled = (scaled - np.array(self.mean, np.float32)) / np.array(self.std, np.float32)
        return np.ascontiguousarray(scaled.transpose(2, 0, 1))


def cropped(image: Image, height: int, width: int) -> Image:
    """Return the middle of an image; black surrounds what is smaller."""
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))
