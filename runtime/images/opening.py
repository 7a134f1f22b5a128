"""Opens image files of a few formats, within bounds that hold before anything is decoded."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ...engines import RequestError
from ...engines.errors import first_line
from .pixels import MOST_PIXELS

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_BYTES = 20 * 2**20
MOST_IMAGES = 32  # in a prompt


@contextmanager
def numbered(number: int, count: int) -> Iterator[None]:
    """Say of several images which one is refused."""
    try:
        yield
    except RequestError as error:
        if count == 1:
            raise
        raise RequestError(f"image {number} of {count}: {error}", error.field) from error


def open_image(content: bytes) -> Image:
    """Return the first frame of an image, upright and in three colours, as transformers loads it."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise RequestError("to read images needs Pillow; pip install 'trt-spec[images]'", "images") from error
    if not content or len(content) > MOST_BYTES:
        raise RequestError(f"an image has {len(content):,} bytes, expected 1 to {MOST_BYTES:,}", "images")
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as file:
            _refuse_large(*file.size)  # before anything is decoded
            return ImageOps.exif_transpose(file).convert("RGB")
    except RequestError:
        raise
    except Exception as error:  # a damaged file makes its reader raise whatever it meets
        unknown = isinstance(error, UnidentifiedImageError)  # whose own words hold the address of an object
        why = "it has no format that is known here" if unknown else first_line(error)
        raise RequestError(
            f"an image cannot be read ({why}); expected a whole file of {', '.join(FORMATS)}", "images"
        ) from error


def _refuse_large(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise RequestError(
            f"an image has {width:,} x {height:,} pixels, expected at most {MOST_PIXELS:,} in all; make it smaller",
            "images",
        )
