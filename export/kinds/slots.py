"""Heads of slots: they read a token beside the hidden state of the one before it, then their own in its place.

The slot of token i reads the embedding of that token and the features of the one before it, and says what follows. A
slot beyond what the target has read takes what the head itself has made for the one before, its own hidden state. The
slot has the place of its token; the first token of a text has none, so nothing sees place 0.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask

from ...engines import CALL, Contract, Engine, ExportError, Masks, State
from ..checking.check import Errors
from ..checkpoints.unknown_tokens import UNKNOWN
from ..families.shape import shape_of
from ..tracing.modules import TracedHead
from .check_slots import compare_slots, said_by, said_in_chunks
from .heads import Compare, Head


class SlotHead(Head):
    """A head whose later proposals read its own hidden states, or masks."""

    _supports_sdpa = True
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    rotary_emb: nn.Module
    mask_token: int | None = None  # that it reads in place of tokens not known yet, instead of its own states

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
            and_mask_function=after_the_first,
        )
        return self._run(input_ids, features, position_ids, mask, cache)

    def _run(
        self, input_ids: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def contract(self, name: str, target: Contract) -> Contract:
        own = shape_of(name, self.config).contract(target.max_length, target.dtype)
        states = (State("hidden", (self.config.hidden_size,), target.dtype, CALL), *own.states)
        return Contract(own.layers, own.heads, states, self.config.vocab_size, target.max_length, target.dtype)

    def traced(self) -> nn.Module:
        return TracedHead(self)

    @property
    def measured_places(self) -> int:
        return 2  # the second slot reads the head's own hidden state

    @property
    def masks(self) -> Masks | None:
        return None if self.mask_token is None else Masks(self.mask_token)

    def says(self, window: Tensor, features: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        places = self.measured_places
        after = torch.arange(1, len(window) - places)  # slots of which every step has a token
        for place, normed in enumerate(self.unrolled(window[None, 1:], features[None, :-1], places)):
            yield after + place, self.logits(normed)[0, : len(after)]

    def expected(self, tokens: Tensor, features: Tensor) -> tuple[float, Compare]:
        def compare(engine: Engine, errors: Errors | None) -> Tensor:
            if errors is not None:
                compare_slots(engine, self, tokens, features, errors)
            return said_in_chunks(engine, tokens, features)

        return scale_of(said_by(self, tokens, features)[0]), compare

    def logits(self, normed: Tensor) -> Tensor:
        """Return logits [B, S, V] over the target's vocabulary."""
        own: Tensor = self.lm_head(normed)
        if own.shape[-1] == self.config.vocab_size:
            return own
        unknown = torch.full_like(own[..., :1], UNKNOWN)
        return torch.cat([own, unknown], -1).index_select(-1, self.places)

    def knows(self, vocab: int, count: int) -> None:
        """Let it propose `count` of the target's tokens: `places` says of each its own number, or `count`."""
        self.register_buffer("places", torch.arange(vocab).clamp(max=count), persistent=False)

    def unrolled(self, tokens: Tensor, features: Tensor, steps: int, later: Tensor | None = None) -> Iterator[Tensor]:
        """Give its hidden states after the last norm [B, S, hidden] after one slot, two and so on, as many as steps.

        The first slots are those of `tokens` [B, S] from the second of a text on, with the `features` [B, S, hidden] of
        the tokens before them. Slot i of step s follows slot i of step s - 1, at the token s places later, and
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
            if self.mask_token is not None:
                tokens = torch.full_like(tokens, self.mask_token)
            if step == 0 and later is not None:
                features, positions = features[:, later], positions[:, later]
                mask, own = mask[later], own[later][:, later]
            chosen = tokens if later is None else tokens[:, later]
            positions = positions + 1
            mask = torch.cat([mask, own], 1)


def ends_of(target: Any) -> dict[str, Tensor]:
    """Return the embedding and the projection of a target, as a head that shares them names them."""
    return {
        "embed_tokens.weight": target.get_input_embeddings().weight.detach(),
        "lm_head.weight": target.get_output_embeddings().weight.detach(),
    }


def scale_of(logits: Tensor) -> float:
    """Return the standard deviation of logits, without those of tokens that the head does not know."""
    return float(logits[logits > logits.min() / 2].std())


def mask_token_of(name: str, fields: Mapping[str, Any], vocab: int) -> int:
    """Return the token that a head reads in place of those that are not known yet."""
    token = fields.get("mask_token_id")
    if type(token) is not int or not 0 <= token < vocab:
        raise ExportError(
            f"config.json of head {name} has the mask_token_id {token!r}, expected one of its {vocab:,} tokens; "
            "download it again"
        )
    return token


def draft_vocabulary(name: str, tensors: Mapping[str, Tensor], vocab: int) -> Tensor:
    """Return the place of each of the target's tokens among those that a head proposes, or the place after them."""
    if "d2t" not in tensors:
        return torch.arange(vocab)
    offsets, count = tensors["d2t"], len(tensors["d2t"])
    ids = offsets + torch.arange(count)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != count:
        raise ExportError(f"tensor d2t of head {name} names no {count} tokens of {vocab:,}; download it again")
    if "t2d" in tensors and not torch.equal(tensors["t2d"].nonzero()[:, 0], ids.sort().values):
        raise ExportError(f"tensors d2t and t2d of head {name} name different tokens; download it again")
    return torch.full((vocab,), count).scatter_(0, ids, torch.arange(count))


def after_the_first(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return query.clamp(max=1) <= key  # the first place sees itself: seeing nothing, it would have no number at all
