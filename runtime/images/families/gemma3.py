"""Gemma 3: one tile of a fixed size, as many tokens for every image, and one before and after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..picture import Picture
from ..pixels import Scaling

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Gemma3:
    """Reads an image as Gemma3Processor does without pan and scan."""

    scaling: Scaling
    size: tuple[int, int] | None  # height and width
    begin: int
    soft: int
    end: int
    count: int

    def read(self, image: Image) -> Picture:
        if self.size is not None:
            image = self.scaling.resized(image, *self.size)
        tokens = (self.begin, *(self.soft,) * self.count, self.end)
        return Picture({"pixels": self.scaling.numbers(image)[None]}, tokens, (1, 1, self.count))
