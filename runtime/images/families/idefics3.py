"""Idefics 3 and SmolVLM: tiles in rows and columns, and the whole image as one more tile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ....engines import RequestError
from ..picture import Picture
from ..pixels import Scaling

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_A_SIDE = 4096  # pixels, whatever the settings ask for


@dataclass(frozen=True)
class Idefics3:
    """Reads an image as Idefics3Processor and SmolVLMProcessor do."""

    scaling: Scaling
    longest: int | None  # resize to this longer side
    size: tuple[int, int] | None  # or to this height and width
    split: bool
    tile: int  # pixels a side
    image_token: int
    count: int  # image tokens a tile
    fence: int  # the token at both ends, and between tiles
    whole: tuple[int, ...]  # before the tile with the whole image
    places: tuple[tuple[tuple[int, ...], ...], ...]  # before each other tile, by row and column
    row_end: tuple[int, ...]
    last_row_end: tuple[int, ...]

    def read(self, image: Image) -> Picture:
        if self.longest is not None:
            image = self.scaling.resized(image, *_with_longest(image.height, image.width, self.longest))
        elif self.size is not None:
            image = self.scaling.resized(image, *self.size)
        rows = columns = 0
        tiles = []
        if self.split:
            image = self.scaling.resized(image, *self._in_tiles(image.height, image.width))
            if image.size != (self.tile, self.tile):
                rows, columns = image.height // self.tile, image.width // self.tile
        self._require_places(rows, columns)
        for top in range(0, rows * self.tile, self.tile):
            for left in range(0, columns * self.tile, self.tile):
                tiles.append(image.crop((left, top, left + self.tile, top + self.tile)))
        if image.size != (self.tile, self.tile) or not self.split:
            image = self.scaling.resized(image, self.tile, self.tile)
        pixels = np.stack([self.scaling.numbers(each) for each in (*tiles, image)])
        return Picture({"pixels": pixels}, self._tokens(rows, columns), (1, 1, len(pixels) * self.count))

    def _in_tiles(self, height: int, width: int) -> tuple[int, int]:
        """Return whole tiles of nearly the image's shape: the longer side is rounded up, then the other one."""
        shape = width / height
        if width >= height:
            width = self._up(width)
            return self._up(int(width / shape)), width
        height = self._up(height)
        return height, self._up(int(height * shape))

    def _up(self, pixels: int) -> int:
        return -(-pixels // self.tile) * self.tile

    def _require_places(self, rows: int, columns: int) -> None:
        most_rows, most_columns = len(self.places), len(self.places[0])
        if rows > most_rows or columns > most_columns:
            raise RequestError(
                f"an image takes {rows} x {columns} tiles, expected at most {most_rows} x {most_columns}; crop it",
                "images",
            )

    def _tokens(self, rows: int, columns: int) -> tuple[int, ...]:
        soft = (self.image_token,) * self.count
        tokens: list[int] = []
        for row in range(rows):
            for column in range(columns):
                tokens += (self.fence, *self.places[row][column], *soft)
            tokens += self.row_end if row < rows - 1 else self.last_row_end
        return (*tokens, self.fence, *self.whole, *soft, self.fence)


def _with_longest(height: int, width: int, longest: int) -> tuple[int, int]:
    """Return the size of this longer side, the other one even, and neither more than the most."""
    shape = width / height
    if width >= height:
        width, height = longest, int(longest / shape)
        height += height % 2
    else:
        height, width = longest, int(longest * shape)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    shape = width / height
    if width >= height and width > MOST_A_SIDE:
        width, height = MOST_A_SIDE, int(MOST_A_SIDE / shape)
    elif height > width and height > MOST_A_SIDE:
        height, width = MOST_A_SIDE, int(MOST_A_SIDE * shape)
    return max(height, 1), max(width, 1)
