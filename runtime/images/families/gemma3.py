"""Gemma 3: squares of one size with as many tokens each, of the whole image and of crops of a long one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..picture import Picture
from ..pixels import Scaling

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Gemma3:
    """Reads an image as Gemma3Processor does, with pan and scan if `crops` says how."""

    scaling: Scaling
    size: tuple[int, int] | None  # height and width
    begin: int
    soft: int
    end: int
    count: int  # of soft tokens in a square
    crops: tuple[int, int, float] | None  # the fewest pixels a side, the most crops, and from which shape on
    lead: str  # text before an image that has crops
    then: tuple[int, ...]  # tokens after the whole of such an image
    between: tuple[int, ...]  # its crops

    def read(self, image: Image) -> Picture:
        crops = [] if self.crops is None else _crops(image, *self.crops)
        squares = [image, *crops]
        if self.size is not None:
            squares = [self.scaling.resized(each, *self.size) for each in squares]
        one = (self.begin, *(self.soft,) * self.count, self.end)
        tokens = one
        if crops:
            tokens = (*one, *self.then, *one, *(*self.between, *one) * (len(crops) - 1))
        pixels = np.stack([self.scaling.numbers(each) for each in squares])
        return Picture({"pixels": pixels}, tokens, (1, 1, len(squares) * self.count), self.lead if crops else "")


def _crops(image: Image, fewest: int, most: int, shape: float) -> list[Image]:
    """Return the parts of an image side by side along its longer side, none if they would be too small."""
    short, long = sorted(image.size)
    if long / short < shape:
        return []
    count = min(most, max(2, min(long // fewest, math.floor(long / short + 0.5))))
    side = -(-long // count)
    if min(side, short) < fewest:
        return []
    # Where an image has fewer pixels than crops, the last have none, and become black.
    ends = [(min(begin, long), min(begin + side, long)) for begin in range(0, count * side, side)]
    if image.width >= image.height:
        return [image.crop((begin, 0, end, image.height)) for begin, end in ends]
    return [image.crop((0, begin, image.width, end)) for begin, end in ends]
