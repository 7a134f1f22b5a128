"""A vision tower as it is traced: from one image to the entries of its tokens."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..tracing.cache import OPSET

PIXELS, GRID = "pixels", "grid"  # what an image is given by
Given = Mapping[str, Tensor]


class Tower(nn.Module):
    """`(pixels) -> (images)`: the whole's own vision tower and projector, over the tiles of one image."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole = whole
        self.dtype = next(whole.parameters()).dtype

    @property
    def config(self) -> Any:
        return self.whole.config

    def set_attn_implementation(self, name: str) -> None:
        self.whole.set_attn_implementation(name)

    def forward(self, *given: Tensor) -> Tensor:
        return self.seen(*given)

    def seen(self, *given: Tensor) -> Tensor:
        [pixels] = given
        found: Tensor = self.whole.model.get_image_features(pixel_values=pixels.to(self.dtype)).pooler_output
        return found.flatten(0, -2)


def joined(hidden: Tensor, width: int) -> Tensor:
    """Put neighbours side by side [patches, size] -> [squares, width], as torch would for a known number of patches."""
    found: Tensor = torch.onnx.ops.symbolic(
        "Reshape",
        [hidden, torch.tensor([-1, width])],
        dtype=hidden.dtype,
        shape=(hidden.shape[0] * hidden.shape[1] // width, width),
        version=OPSET,
    )
    return found
