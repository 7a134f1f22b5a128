"""The vision tower of LLaVA."""

import torch
from torch import Tensor

from .tower import Tower


class Llava(Tower):
    """Its own code would make a list of the tiles."""

    def seen(self, *given: Tensor) -> Tensor:
        [pixels] = given
        model, config = self.whole.model, self.config
        hidden = model.vision_tower(pixels.to(self.dtype), output_hidden_states=True).hidden_states
        layers = config.vision_feature_layer
        read = [hidden[layer] for layer in ([layers] if isinstance(layers, int) else layers)]
        if config.vision_feature_select_strategy == "default":  # without what stands for the whole
            read = [one[:, 1:] for one in read]
        found: Tensor = model.multi_modal_projector(torch.cat(read, -1))
        return found.flatten(0, 1)
