"""Sources on which an encoder–decoder is checked and measured."""

from collections.abc import Sequence
from itertools import cycle, islice

import torch
from torch import Tensor

from ..families.shape import SourceShape

LENGTHS = (23, 1, 40, 12)  # of those that are tokens: one for each row of the check
SEED = 0


def example_sources(shape: SourceShape | None, text: Sequence[int]) -> list[dict[str, Tensor]]:
    """Make sources as transformers' encoders take them, each by itself: pieces of a text, or noise."""
    if shape is None:
        return []
    if shape.sound is not None:
        generator = torch.Generator().manual_seed(SEED)
        size = len(LENGTHS), 1, shape.sound.bands, shape.sound.frames
        return [{"input_features": one} for one in torch.randn(size, generator=generator)]
    tokens = cycle(text)
    return [{"input_ids": torch.tensor([list(islice(tokens, min(length, shape.longest)))])} for length in LENGTHS]
