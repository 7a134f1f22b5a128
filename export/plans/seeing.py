"""The sizes of images that a plan of a vision graph reads, from what the bundle keeps of the checkpoint's processor."""

import json
from collections.abc import Callable, Mapping
from math import isqrt
from pathlib import Path
from typing import Any

from ...engines import ExportError, VisionContract
from ...engines.tensorrt import Ranges

SETTINGS = "images.json"
LONGEST_TO_SHORTEST = 200  # sides of an image that Qwen reads

Settings = Mapping[str, Any]


def ranges_of_images(bundle: Path, contract: VisionContract) -> Ranges:
    """Return the smallest and the largest size of each symbol of a vision graph."""
    kept = json.loads((bundle / SETTINGS).read_text(encoding="utf-8"))
    found = SIZES[kept["family"]](kept["settings"])
    symbols = dict.fromkeys(dim for spec in contract.inputs for dim in spec.shape if isinstance(dim, str))
    return tuple((name, *found[name]) for name in symbols)


def _one_tile(settings: Settings) -> dict[str, tuple[int, int]]:
    return {"tiles": (1, 1)}


def _squares(settings: Settings) -> dict[str, tuple[int, int]]:
    most = settings["crops"][1] if settings["crops"] else 0
    return {"tiles": (1, 1 + most)}


def _tiles(settings: Settings) -> dict[str, tuple[int, int]]:
    rows = settings["places"] if settings["split"] else []
    return {"tiles": (1, 1 + sum(map(len, rows)))}  # one of the whole image


def _shapes(settings: Settings) -> dict[str, tuple[int, int]]:
    patch, most = settings["patch"], settings["crop"] or settings["most"]
    if not most:
        raise _unbounded()
    height, width = (-(-side // patch) * patch for side in most)
    return {"image_height": (patch, height), "image_width": (patch, width)}


def _patches(settings: Settings) -> dict[str, tuple[int, int]]:
    if not settings["bounds"]:
        raise _unbounded()
    fewest, most = settings["bounds"]
    pixels = _most_pixels(fewest, most, settings["patch"] * settings["merge"])
    return {"patches": (settings["merge"] ** 2, pixels // settings["patch"] ** 2)}


def _most_pixels(fewest: int, most: int, side: int) -> int:
    """Return how many pixels an image has at most whose sides are multiples of `side`, nearly within these bounds.

    A narrow one that is shrunk keeps one such square across; one that is enlarged is rounded up both ways.
    """
    narrow = isqrt(LONGEST_TO_SHORTEST * most) // side
    enlarged = [isqrt(LONGEST_TO_SHORTEST * fewest) // side + 1]
    for across in range(2, isqrt(fewest) // side + 2):  # each is wider than one square less
        enlarged.append(across * min(enlarged[0], fewest // ((across - 1) * side**2) + 1))
    return max(most // side**2, narrow, *enlarged) * side**2


def _unbounded() -> ExportError:
    return ExportError(
        "the target reads images of any size, for which no plan can be made; let its processor resize them, and export "
        "again"
    )


SIZES: Mapping[str, Callable[[Settings], dict[str, tuple[int, int]]]] = {  # by the family that images.json names
    "gemma3": _squares,
    "idefics3": _tiles,
    "llava": _one_tile,
    "pixtral": _shapes,
    "qwen": _patches,
}
