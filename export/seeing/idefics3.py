"""The vision towers of SmolVLM and Idefics 3, which read tiles of one size."""

from typing import Any

import torch
from torch import Tensor

from .tower import Tower


class Idefics3(Tower):
    def __init__(self, whole: Any) -> None:
        super().__init__(whole)
        self.places = _places(whole)

    def seen(self, *given: Tensor) -> Tensor:
        [pixels] = given
        eyes = self.whole.model.vision_model
        patches = eyes.embeddings.patch_embedding(pixels.to(self.dtype)).flatten(2).transpose(1, 2)
        hidden = patches + eyes.embeddings.position_embedding.weight[self.places]
        hidden = eyes.encoder(inputs_embeds=hidden, attention_mask=None).last_hidden_state
        found: Tensor = self.whole.model.connector(eyes.post_layernorm(hidden))
        return found.flatten(0, 1)


@torch.no_grad()
def _places(whole: Any) -> Tensor:
    """Return which positions transformers gives to the patches of a tile, by letting it read one."""
    config, embeddings = whole.config.vision_config, whole.model.vision_model.embeddings
    found: list[Tensor] = []
    hook = embeddings.position_embedding.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    side, weight = config.image_size, embeddings.patch_embedding.weight
    try:
        seen = torch.ones(1, side // config.patch_size, side // config.patch_size, dtype=torch.bool)
        embeddings(pixel_values=torch.zeros(1, 3, side, side, dtype=weight.dtype), patch_attention_mask=seen)
    finally:
        hook.remove()
    return found[0][0]
