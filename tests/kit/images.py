"""Image files of any size and kind, made of noise and of a slope, so that each filter and each turn shows."""

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

UPRIGHT, TURNED = 1, 6  # of EXIF
ORIENTATION = 0x0112


def picture(width: int, height: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 128, (height, width, 4))
    slope = np.add.outer(np.linspace(0, 100, height), np.linspace(0, 27, width))[..., None]
    made = Image.fromarray((noise + slope).astype(np.uint8), "RGBA")
    return made.quantize(16) if mode == "P" else made.convert(mode)


def image_file(
    width: int, height: int, mode: str = "RGB", kind: str = "PNG", turn: int = UPRIGHT, **saved: Any
) -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[ORIENTATION] = turn
    picture(width, height, mode).save(file, kind, **({"exif": exif} if turn != UPRIGHT else {}), **saved)
    return file.getvalue()


def data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()
