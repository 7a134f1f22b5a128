"""Trace an encoder–decoder so that positions come from a call's places, and sources from memory."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EncoderDecoderCache

from ...engines import SOURCES
from ..tracing.cache import Places, ScatterCache
from ..tracing.modules import TracedModel, positions_of_entries
from ..tracing.swapping import Factor, swapped
from .with_source import WithSource

FACTORS = ("embed_scale", "model_dim")  # of embeddings, and by T5 of what its vocabulary is asked about


class _Source:
    """The keys and values of a layer's source, which it finds here and does not make."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values


class TwoCaches(EncoderDecoderCache):  # type: ignore[misc]
    """The entries of a text, which are written, and those of its source, which are read."""

    def __init__(self, text: ScatterCache, sources: Sequence[Tensor]) -> None:
        each = iter(sources)
        self.self_attention_cache, self.cross_attention_cache = text, ScatterCache(text.places, {})
        self.cross_attention_cache.layers = [_Source(keys, values) for keys, values in zip(each, each, strict=True)]
        self.is_updated = dict.fromkeys(range(len(self.cross_attention_cache.layers)), True)
        self.places, self.kept = text.places, text.kept

    def get_query_offset(self, layer_idx: int = 0) -> Places:
        return self.places


class TracedWithSource(TracedModel):
    """`(input_ids, start, depths, ancestors, logit_rows, source_length, past_…) -> (logits, present_…)`.

    `source_length` is there if the rows of a call may have sources of unlike lengths. The states of a source
    are only read.
    """

    def __init__(self, model: WithSource, positions: int, names: Sequence[str], capabilities: Sequence[str]) -> None:
        super().__init__(model, positions, {}, names)
        self.ragged, self.biases = SOURCES in capabilities, biases_of(model.decoder)

    def forward(  # torch.export names inputs by it
        self, input_ids: Tensor, start: Tensor, depths: Tensor, ancestors: Tensor, logit_rows: Tensor, *more: Tensor
    ) -> tuple[Tensor, ...]:
        source_length, past = (more[0], more[1:]) if self.ragged else (None, more)
        states = dict(zip(self.names, past, strict=True))
        sources = {name: states.pop(name) for name in self.names if name.startswith("cross_")}
        places = Places.of(start, depths, ancestors)
        cache = TwoCaches(ScatterCache(places, states), list(sources.values()))
        first = next(iter(sources.values()))  # [B, heads, T, D]
        width = self.model.config.hidden_size
        hidden = torch.zeros(1, first.shape[2], width, dtype=first.dtype).expand(first.shape[0], -1, -1)
        seen = None if source_length is None else seen_of(source_length, first.shape[2])
        own_positions = (start[:, None] + places.depths).clamp(max=self.last_position)  # [B, S]
        with self.model.given(hidden, seen), placed(self.model, self.biases, own_positions, places):
            return self.said(input_ids, logit_rows, cache)


def seen_of(length: Tensor, entries: int) -> Tensor:
    """Say which entries of sources of some lengths [B] count [B, T], of an empty one the first."""
    return torch.arange(entries) < length[:, None].clamp(min=1)


@contextmanager
def placed(
    stack: Any, biases: dict[nn.Module, Tensor], positions: Tensor, places: Places | None = None
) -> Iterator[None]:
    """Let an encoder or a decoder take positions [B or 1, S] as they are given, until the block ends.

    Under `places` the biases of a decoder's attention go by the positions of entries; an encoder's by their order.
    """
    with ExitStack() as patches:
        embedding = getattr(stack, "embed_positions", None)
        if embedding is not None:
            patches.enter_context(swapped(embedding, forward=lambda *_, **__: _table_of(embedding)[positions]))
        for module, table in biases.items():
            patches.enter_context(swapped(module, compute_bias=partial(_bias, table, positions, places)))
        for module in stack.modules():
            if hasattr(module, "EncDecAttention"):
                patches.enter_context(swapped(module.EncDecAttention, unbiased=True))  # it is given zeros
            for name in FACTORS:
                if name in vars(module):
                    patches.enter_context(swapped(module, **{name: Factor(getattr(module, name))}))
        yield


def _table_of(embedding: Any) -> Tensor:
    """Return what an embedding of positions says of 0, 1, …"""
    made = hasattr(embedding, "weights")
    first = embedding.padding_idx + 1 if made else getattr(embedding, "offset", 0)
    table: Tensor = (embedding.weights if made else embedding.weight)[first:]
    return table


def biases_of(stack: Any) -> dict[nn.Module, Tensor]:
    """Return the bias of each distance from -M to M [2M + 1, heads] of attentions that go by it; beyond, none changes.

    They are made before anything is traced: their logarithms must not round otherwise in an engine.
    """
    found = {}
    for module in stack.modules():
        if getattr(module, "has_relative_attention_bias", False):
            most = module.relative_attention_max_distance
            found[module] = module.compute_bias(1, 2 * most + 1, past_seen_tokens=most)[0, :, 0].T.detach().contiguous()
    return found


def _bias(
    table: Tensor, positions: Tensor, places: Places | None, _: int, entries: int, **__: Any
) -> Tensor:  # [B or 1, heads, S, T]
    own = torch.arange(entries)[None] if places is None else positions_of_entries(places, entries)  # [B, T]
    most = table.shape[0] // 2
    distance = (own[:, None] - positions[:, :, None]).clamp(-most, most) + most  # [B, S, T]
    return table[distance].permute(0, 3, 1, 2)
