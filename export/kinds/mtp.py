"""MTP: one layer of the target's kind that reads an embedding beside the target's last hidden state."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import MtpLayer

from .layers import LayerClasses
from .slots import SlotHead


class Mtp(SlotHead):
    """One such layer, which proposes every token of a round: behind the first it reads its own hidden states."""

    def __init__(self, config: Any, classes: LayerClasses) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layer = MtpLayer(config, classes.layer, classes.norm, 0)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary_emb = classes.rotary(config)
        self.norm_output = True  # its own hidden state is read as its norm gives it, not as its layer does

    def _run(
        self, input_ids: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layer
        read = torch.cat([layer.enorm(self.embed_tokens(input_ids)), layer.hnorm(features)], -1)
        hidden = layer.mtp_block(
            layer.eh_proj(read),
            attention_mask=mask,
            position_ids=position_ids,
            position_embeddings=self.rotary_emb(features, position_ids),
            cache=cache,
        )
        normed = layer.post_norm(hidden)
        return (normed if self.norm_output else hidden), normed

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # its layer may have experts, as its target's have
