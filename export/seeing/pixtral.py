"""The vision tower of Mistral Small 3, which reads images of any size."""

import torch
from torch import Tensor, nn

from .tower import Tower


class Pixtral(Tower):
    def seen(self, *given: Tensor) -> Tensor:
        [pixels] = given  # [1, 3, height, width]
        eyes, projector, config = self.whole.model.vision_tower, self.whole.model.multi_modal_projector, self.config
        patches = eyes.patch_conv(pixels.to(self.dtype))
        rows, columns = patches.shape[2:]
        hidden = eyes.ln_pre(patches.flatten(2).transpose(1, 2))  # [1, patches, hidden]
        places = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), -1).flatten(0, 1)
        angles = eyes.patch_positional_embedding(hidden, places)
        states = [hidden]
        for layer in eyes.transformer.layers:
            states.append(layer(states[-1], None, position_embeddings=angles))
        layers = config.vision_feature_layer
        hidden = torch.cat([states[layer] for layer in ([layers] if isinstance(layers, int) else layers)], -1)
        image = projector.norm(hidden).transpose(1, 2).reshape(1, -1, rows, columns)
        # A matrix over squares of patches is a convolution, which any number of rows and columns fits.
        merger, side = projector.patch_merger, config.spatial_merge_size
        merged = nn.functional.conv2d(image, merger.merging_layer.weight.unflatten(1, (-1, side, side)), stride=side)
        found: Tensor = projector.linear_2(projector.act(projector.linear_1(merged[0].flatten(1).T)))
        return found
