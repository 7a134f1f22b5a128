"""The flags that name images and hosts of them, the files that it names, and messages that hold them."""

import argparse
from pathlib import Path
from typing import Any

from ...engines import RequestError
from ...runtime.images.opening import MOST_BYTES


def add_image_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--image",
        metavar="F",
        action="append",
        type=Path,
        default=[],
        help="an image (PNG, JPEG, WebP or GIF) for each placeholder in the prompt, or for --chat; may be repeated",
    )


def add_image_hosts_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--image-hosts",
        metavar="HOST",
        action="append",
        type=not_blank,
        default=[],
        help="let clients name images at this HOST or HOST:PORT; may be repeated (default: they send data URLs)",
    )


def not_blank(text: str) -> str:
    """Refuse what a variable that is not set comes to."""
    if not text.strip():
        raise argparse.ArgumentTypeError("it is empty; give a value, or leave it out")
    return text


def read_image(path: Path) -> bytes:
    """Read a file that may be an image."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise RequestError(f"image {path} cannot be read ({error.strerror}); give another") from error
    if len(content) > MOST_BYTES:
        raise RequestError(f"image {path} has more than {MOST_BYTES:,} bytes; give a smaller one")
    return content


def said_with_images(text: str, images: int) -> dict[str, Any]:
    """Return a user's message: the text, after so many images."""
    parts = [*[{"type": "image"}] * images, {"type": "text", "text": text}]
    return {"role": "user", "content": parts if images else text}
