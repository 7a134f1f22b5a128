"""The vision tower of Pixtral, which reads images of any size: that of Mistral Small 3, and of some LLaVAs."""

from typing import Any

import torch
from torch import Tensor, nn

from ...engines import ExportError
from .tower import Tower


class Pixtral(Tower):
    """Of Mistral Small 3, which merges squares of patches."""

    def seen(self, *given: Tensor) -> Tensor:
        [pixels] = given  # [1, 3, height, width]
        projector, hidden, rows, columns = self.whole.model.multi_modal_projector, *self.patches(pixels)
        image = projector.norm(hidden).transpose(1, 2).reshape(1, -1, rows, columns)
        # A matrix over squares of patches is a convolution, which any number of rows and columns fits.
        merger, side = projector.patch_merger, self.config.spatial_merge_size
        merged = nn.functional.conv2d(image, merger.merging_layer.weight.unflatten(1, (-1, side, side)), stride=side)
        found: Tensor = projector.linear_2(projector.act(projector.linear_1(merged[0].flatten(1).T)))
        return found

    def patches(self, pixels: Tensor) -> tuple[Tensor, int, int]:
        """Return what the tower makes of an image [1, patches, hidden], and how many rows and columns they have."""
        eyes, layers = self.whole.model.vision_tower, self.config.vision_feature_layer
        patches = eyes.patch_conv(pixels.to(self.dtype))
        rows, columns = patches.shape[2:]
        hidden = eyes.ln_pre(patches.flatten(2).transpose(1, 2))  # [1, patches, hidden]
        places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1).flatten(0, 1)
        angles = eyes.patch_positional_embedding(hidden, places)
        states = [hidden]
        for layer in eyes.transformer.layers:
            states.append(layer(states[-1], None, position_embeddings=angles))
        found = torch.cat([states[layer] for layer in ([layers] if isinstance(layers, int) else layers)], -1)
        return found, rows, columns


class LlavaPixtral(Pixtral):
    """Of LLaVA, which has a token for each patch."""

    def __init__(self, whole: Any) -> None:
        super().__init__(whole)
        if (strategy := whole.config.vision_feature_select_strategy) != "full":
            raise ExportError(
                f"the checkpoint has vision_feature_select_strategy {strategy!r}, by which an image of Pixtral loses a "
                "patch, expected 'full'; correct config.json, or leave out --images"
            )

    def seen(self, *given: Tensor) -> Tensor:
        [pixels] = given
        hidden, _, _ = self.patches(pixels)
        found: Tensor = self.whole.model.multi_modal_projector(hidden)[0]
        return found
