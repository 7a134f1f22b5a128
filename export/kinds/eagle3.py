"""EAGLE-3: a layer or a few that read the target's features beside each token, and then their own in their place.

The slot of token i reads the embedding of that token and the features of the one before it, and says what follows. A
slot beyond what the target has read takes what the head itself has made for the one before, its own hidden state. The
slot stands at the place of its token; the first token of a text has none, so nothing sees place 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from ..checkpoint import UNKNOWN
from ..tracing import TracedHead


@dataclass(frozen=True)
class LayerClasses:
    layer: Any
    norm: Any
    rotary: Any


LAYERS = {
    "llama": LayerClasses(
        modeling_llama.LlamaDecoderLayer, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaRotaryEmbedding
    ),
    "qwen3": LayerClasses(
        modeling_qwen3.Qwen3DecoderLayer, modeling_qwen3.Qwen3RMSNorm, modeling_qwen3.Qwen3RotaryEmbedding
    ),
}


@dataclass(frozen=True)
class Wiring:
    """How a head is joined to its target. Published configurations leave part of it open."""

    layers: tuple[int, ...]  # of which hidden states it reads: 0 is the embedding's, LAST the last one, normed
    norm_before_residual: bool = False  # the residual of its first layer is normed
    norm_output: bool = False  # its own hidden state is fed back as its last norm gives it, not as its last layer does
    theta: float | None = None  # of its rotary positions; None: as its configuration says


@dataclass(frozen=True)
class Parts:
    """What a head has beside its layers."""

    target_hidden: int  # width of the target's hidden states
    inputs: int  # how many of them it reads
    draft_vocab: int  # tokens that it may propose
    fc: bool = True  # without, the hidden states are its features
    fc_bias: bool = False
    norm_before_fc: bool = False  # one norm of all that it reads
    fc_norm: bool = False  # one norm of each


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


class Eagle3(PreTrainedModel):  # type: ignore[misc]
    """The head, over the target's vocabulary."""

    _supports_sdpa = True

    def __init__(self, config: Any, parts: Parts, wiring: Wiring) -> None:
        super().__init__(config)
        self.parts, self.wiring = parts, wiring
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
        # Of each token of the target its place among those that the head may propose, or the place behind them.
        self.register_buffer("places", torch.arange(config.vocab_size).clamp(max=parts.draft_vocab), persistent=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,  # [B, S]
        features: Tensor,  # [B, S, hidden], of the token before each
        position_ids: Tensor,
        cache: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states [B, S, hidden] of these slots, and what their logits are made of."""
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=features,
            attention_mask=None,
            cache=cache,
            position_ids=position_ids,
            and_mask_function=_behind_the_first,
        )
        return self._run(input_ids, features, position_ids, mask, cache)

    def _run(
        self, input_ids: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any
    ) -> tuple[Tensor, Tensor]:
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

    def traced(self) -> nn.Module:
        return TracedHead(self)

    def logits(self, normed: Tensor) -> Tensor:
        """Return logits [B, S, V] over the target's vocabulary."""
        own: Tensor = self.lm_head(normed)
        if self.parts.draft_vocab == self.config.vocab_size:
            return own
        unknown = torch.full_like(own[..., :1], UNKNOWN)
        return torch.cat([own, unknown], -1).index_select(-1, self.places)

    def unrolled(self, tokens: Tensor, features: Tensor, steps: int, later: Tensor | None = None) -> Iterator[Tensor]:
        """Give its hidden states behind the last norm [B, S, hidden] after one slot, two and so on, as many as steps.

        The first slots are those of `tokens` [B, S] from the second of a text on, with the `features` [B, S, hidden] of
        the tokens before them. Slot i of step s stands behind slot i of step s - 1, at the token s places later, and
        sees of the first step what that saw. With `later` the steps after the first are taken by these slots alone.
        """
        batch, width = tokens.shape
        cache = DynamicCache()
        seen = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()
        own = torch.eye(width, dtype=torch.bool, device=tokens.device)
        positions = torch.arange(1, width + 1, device=tokens.device).expand(batch, width)
        mask, lowest = seen, torch.finfo(features.dtype).min
        chosen = tokens
        for step in range(steps):
            floats = torch.zeros(mask.shape, dtype=features.dtype, device=tokens.device).masked_fill(~mask, lowest)
            features, normed = self._run(chosen, features, positions, floats[None, None], cache)
            yield normed
            tokens = torch.nn.functional.pad(tokens[:, 1:], (0, 1))
            if step == 0 and later is not None:
                features, positions = features[:, later], positions[:, later]
                mask, own = mask[later], own[later][:, later]
            chosen = tokens if later is None else tokens[:, later]
            positions = positions + 1
            mask = torch.cat([mask, own], 1)


def _behind_the_first(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return query.clamp(max=1) <= key  # the first place sees itself: seeing nothing, it would have no number at all
