"""One image as a vision graph reads it, and what stands for it in the prompt."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np


@dataclass(frozen=True, eq=False)
class Picture:
    """The inputs of a vision graph for one image, by name.

    `pixels` is float32 [tiles, 3, height, width]. Where the family reads patches, it is [patches, features], and `grid`
    is int64 [3]: frames, rows and columns of patches.
    """

    inputs: Mapping[str, np.ndarray]
    tokens: tuple[int, ...]  # in place of the placeholder: those of the image, and those around and between them
    grid: tuple[int, int, int]  # for M-RoPE: frames, rows, columns of merged patches; (1, 1, image tokens) elsewhere
    lead: str = ""  # text before the placeholder and all that surrounds it

    @cached_property
    def digest(self) -> str:
        """A name that tells it from others, by all that the models read."""
        found = sha256(repr((self.tokens, self.grid)).encode())
        for name, values in sorted(self.inputs.items()):
            found.update(f"{name} {values.dtype} {values.shape}".encode())
            found.update(values.tobytes())
        return found.hexdigest()


def more_tokens(pictures: Iterable[Picture]) -> int:
    """Return how many more tokens a prompt has once pictures have taken their placeholders' places."""
    return sum(len(picture.tokens) - 1 for picture in pictures)
