"""Heads of slots: they read a token beside the hidden state of the one before it, then their own in its place.

The slot of token i reads the embedding of that token and the features of the one before it, and says what follows. A
slot beyond what the target has read takes what the head itself has made for the one before, its own hidden state. The
slot stands at the place of its token; the first token of a text has none, so nothing sees place 0.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import create_causal_mask

from ...engines import CALL, Contract, ExportError, Masks, State
from ..checking.quality import Sample
from ..checkpoints.checkpoint import UNKNOWN
from ..families.shape import shape_of
from ..tracing.hidden_states import Features
from ..tracing.modules import TracedHead
from .heads import LoadedHead
from .overlap import overlaps

WEAK = 0.2  # an overlap below which a head is probably wired wrong
PLACES = 2  # slots in a row that are measured: the second reads the head's own hidden state


class SlotHead(PreTrainedModel):  # type: ignore[misc]
    """A head over the target's vocabulary."""

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
            and_mask_function=behind_the_first,
        )
        return self._run(input_ids, features, position_ids, mask, cache)

    def _run(
        self, input_ids: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any
    ) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def traced(self) -> nn.Module:
        return TracedHead(self)

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
            if self.mask_token is not None:
                tokens = torch.full_like(tokens, self.mask_token)
            if step == 0 and later is not None:
                features, positions = features[:, later], positions[:, later]
                mask, own = mask[later], own[later][:, later]
            chosen = tokens if later is None else tokens[:, later]
            positions = positions + 1
            mask = torch.cat([mask, own], 1)


def measured(head: SlotHead, features: Features, target: Any, sample: Sample) -> list[float]:
    """Return the overlap of a head's law with its target's at its first places."""

    def says(window: Tensor, states: dict[int, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        after = torch.arange(1, len(window) - PLACES)  # slots of which every step has a token
        for place, normed in enumerate(head.unrolled(window[None, 1:], features(states)[:, :-1], PLACES)):
            yield after + place, head.logits(normed)[0, : len(after)]

    return overlaps(head, PLACES, says, target, sample)


def draft_vocabulary(name: str, tensors: Mapping[str, Tensor], vocab: int) -> Tensor:
    """Return the place of each of the target's tokens among those that a head proposes, or the place behind them."""
    if "d2t" not in tensors:
        return torch.arange(vocab)
    offsets, count = tensors["d2t"], len(tensors["d2t"])
    ids = offsets + torch.arange(count)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != count:
        raise ExportError(f"tensor d2t of head {name} names no {count} tokens of {vocab:,}; download it again")
    if "t2d" in tensors and not torch.equal(tensors["t2d"].nonzero()[:, 0], ids.sort().values):
        raise ExportError(f"tensors d2t and t2d of head {name} name different tokens; download it again")
    return torch.full((vocab,), count).scatter_(0, ids, torch.arange(count))


def loaded(
    name: str,
    head: SlotHead,
    features: Features,
    contract: Contract,
    readings: Mapping[str, list[float]],  # overlap by place of each way to wire it, in words
    chosen: str,
    masks: Masks | None = None,
) -> LoadedHead:
    """Return a head that is wired as chosen beside its target of this contract, and say what was chosen among."""
    layer, found = head.config, readings[chosen]
    notes = [f"{name} {chosen}: it overlaps with its target by {_shares(found)}"]
    notes += [f"not taken: {way}, by {_shares(own)}" for way, own in readings.items() if way != chosen]
    if found[0] < WEAK:
        notes.append(
            f"{name} agrees with this target on few tokens, however it is wired; it was probably trained for another "
            "target, or for other text"
        )
    own = shape_of(name, layer).contract(contract.max_length, contract.dtype)
    return LoadedHead(
        head,
        features,
        layers=own.layers,
        heads=own.heads,
        hidden=layer.hidden_size,
        vocab_size=layer.vocab_size,
        states=(
            State("hidden", (layer.hidden_size,), contract.dtype, CALL),
            *own.states,
        ),
        masks=masks,
        notes=notes,
        readings=dict(readings),
    )


def _shares(found: list[float]) -> str:
    return ", then ".join(f"{share:.3f}" for share in found)


def behind_the_first(batch: Any, head: Any, query: Tensor, key: Tensor) -> Tensor:
    return query.clamp(max=1) <= key  # the first place sees itself: seeing nothing, it would have no number at all
