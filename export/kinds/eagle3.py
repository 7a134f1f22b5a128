"""EAGLE-3: a layer or a few that read an embedding beside features which its encoder makes of several hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .layers import LAYERS
from .slots import SlotHead


@dataclass(frozen=True)
class Wiring:
    """How a head is joined to its target. Published configurations leave part of it open."""

    layers: tuple[int, ...]  # of which hidden states it reads: 0 is the embedding's, LAST the last one, normed
    norm_before_residual: bool = False  # the residual of its first layer is normed
    norm_output: bool = False  # its own hidden state is fed back as its last norm gives it, not as its last layer does
    theta: float | None = None  # of its rotary positions; None: as its configuration says


@dataclass(frozen=True)
class Parts:
    """The parts of a head beside its layers."""

    target_hidden: int  # width of the target's hidden states
    inputs: int  # how many of them it reads
    draft_vocab: int  # tokens that it may propose
    fc: bool = True  # without, the hidden states are its features
    fc_bias: bool = False
    norm_before_fc: bool = False  # one norm of all that it reads
    fc_norm: bool = False  # one norm of each
    mask_token: int | None = None  # that it reads in place of one not known yet (P-EAGLE)


class Encoder(nn.Module):
    """Makes a token's features of the target's hidden states; it is computed in the target's graph."""

    def __init__(self, parts: Parts, config: Any, norm: Any) -> None:
        super().__init__()
        width, each = parts.inputs * parts.target_hidden, parts.target_hidden
        if parts.norm_before_fc:
            self.input_norm = norm(width, eps=config.rms_norm_eps)
        if parts.fc_norm:
            self.fc_norm = nn.ModuleList(norm(each, eps=config.rms_norm_eps) for _ in range(parts.inputs))
        if parts.fc:
            self.fc = nn.Linear(width, config.hidden_size, bias=parts.fc_bias)

    def forward(self, hidden: Sequence[Tensor]) -> Tensor:
        """Encode hidden states [B, S, target_hidden] as features [B, S, hidden]."""
        if hasattr(self, "fc_norm"):
            hidden = [norm(one) for norm, one in zip(self.fc_norm, hidden, strict=True)]
        joined = torch.cat(list(hidden), -1)
        if hasattr(self, "input_norm"):
            joined = self.input_norm(joined)
        return self.fc(joined) if hasattr(self, "fc") else joined


class Eagle3(SlotHead):
    def __init__(self, config: Any, parts: Parts, wiring: Wiring) -> None:
        super().__init__(config)
        self.parts, self.wiring, self.mask_token = parts, wiring, parts.mask_token
        classes = LAYERS[config.model_type]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(classes.layer(config, place) for place in range(config.num_hidden_layers))
        first = self.layers[0]
        for name in ("q_proj", "k_proj", "v_proj"):  # they read an embedding beside a hidden state
            old = getattr(first.self_attn, name)
            wide = nn.Linear(2 * config.hidden_size, old.out_features, bias=old.bias is not None)
            setattr(first.self_attn, name, wide)
        first.hidden_norm = classes.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm = classes.norm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, parts.draft_vocab, bias=False)
        self.rotary_emb = classes.rotary(config)
        self.encoder = Encoder(parts, config, classes.norm)
        self.knows(config.vocab_size, parts.draft_vocab)
        if parts.mask_token is not None:
            self.mask_hidden = nn.Parameter(torch.zeros(1, 1, parts.inputs * parts.target_hidden))
            # What is read in place of features that there are none of: the encoder's of `mask_hidden`.
            self.register_buffer("mask_features", torch.zeros(1, 1, config.hidden_size), persistent=False)

    def _run(
        self, input_ids: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any
    ) -> tuple[Tensor, Tensor]:
        if self.mask_token is not None:
            features = torch.where((input_ids == self.mask_token)[..., None], self.mask_features, features)
        rotary = self.rotary_emb(features, position_ids)
        hidden = features
        for place, layer in enumerate(list[Any](self.layers)):
            residual = hidden
            if place:
                read = layer.input_layernorm(hidden)
            else:
                normed = layer.hidden_norm(hidden)
                if self.wiring.norm_before_residual:
                    residual = normed
                read = torch.cat([layer.input_layernorm(self.embed_tokens(input_ids)), normed], -1)
            hidden = residual + layer.self_attn(read, rotary, mask, cache)[0]
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        normed = self.norm(hidden)
        return (normed if self.wiring.norm_output else hidden), normed
