"""Reads images as the checkpoint's own processor would, from the settings that a bundle keeps of it."""

import json
from collections.abc import Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any, Self

from ...engines import BundleError, RequestError
from ...engines.errors import counted
from .families.table import FAMILIES, Family
from .opening import MOST_IMAGES, open_image
from .picture import Picture
from .pixels import Scaling

SETTINGS = "images.json"  # in a bundle


class ImageReader:
    """Makes pictures of image files, and puts them in the places that a prompt has for them.

    In text such a place is the `placeholder`, and `surrounded` puts around it what the processor puts there for its
    picture. In tokens it is the `image_token`, which `expand` replaces.
    """

    def __init__(self, family: Family, image_token: int, placeholder: str, around: Sequence[str] = ("", "")) -> None:
        self.image_token, self.placeholder = image_token, placeholder
        self._family, self._around = family, around

    @classmethod
    def open(cls, bundle: Path) -> Self:
        """Read the settings that a bundle keeps."""
        path = bundle / SETTINGS
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            family, settings = kept.pop("family"), _tuples(kept.pop("settings"))
            scaling = Scaling(**settings.pop("scaling"))
            return cls(FAMILIES[family](scaling=scaling, **settings), **kept)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise BundleError(f"{path} does not say how to read images ({error!r}); export the bundle again") from error

    def read(self, content: bytes) -> Picture:
        """Read one image file; a broken one is refused in a sentence."""
        image = open_image(content)
        try:
            return self._family.read(image)
        except (ValueError, MemoryError) as error:
            raise RequestError(
                f"an image of {image.width:,} x {image.height:,} pixels cannot be read as this model reads images "
                f"({error}); resize it",
                "images",
            ) from error

    def surrounded(self, prompt: str, pictures: Sequence[Picture]) -> str:
        """Put around each placeholder the text that the processor puts there."""
        (before, after), (first, *others) = self._around, prompt.split(self.placeholder)
        leads = chain((picture.lead for picture in pictures), repeat(""))  # `expand` refuses other numbers of pictures
        placed = (lead + before + self.placeholder + after + text for lead, text in zip(leads, others, strict=False))
        return first + "".join(placed)

    def expand(self, ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """Put each picture's tokens in its placeholder's place."""
        if len(pictures) > MOST_IMAGES:
            raise RequestError(f"there are {len(pictures)} images, expected at most {MOST_IMAGES}", "images")
        places = sum(token == self.image_token for token in ids)
        if places != len(pictures):
            raise RequestError(
                f"the prompt has {counted(places, 'place')} for {counted(len(pictures), 'image')}; write "
                f"{self.placeholder} once for each",
                "images",
            )
        left = iter(pictures)
        expanded: list[int] = []
        for token in ids:
            expanded += next(left).tokens if token == self.image_token else (token,)
        return expanded


def _tuples(value: Any) -> Any:
    """Return settings with tuples for JSON's lists."""
    if isinstance(value, dict):
        return {key: _tuples(each) for key, each in value.items()}
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
