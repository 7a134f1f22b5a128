"""Attend as BLOOM does, whose entries count less the farther they are before a token, and gate by the one node for it.

Its own gate has numbers that would be others as half-precision constants.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod
from typing import Any

from torch import Tensor
from transformers.models.bloom import modeling_bloom as modeling

from ..tracing.swapping import swapped
from .attending import alibi, asked, with_attention
from .gates import gate


def attend(
    self: Any, hidden: Tensor, residual: Tensor, *, attention_mask: Tensor, layer_past: Any, slopes: Tensor, **_: Any
) -> tuple[Tensor, None]:
    query, key, value = self._reshape(self.query_key_value(hidden))
    key, value = layer_past.update(key, value, self.layer_idx)
    found = asked(self, query, key, value, attention_mask, position_bias=alibi(slopes, layer_past.places, key))
    return residual + self.dense(found), None


@contextmanager
def ready(model: Any) -> Iterator[None]:
    attending = partialmethod(attend, slopes=modeling._get_alibi_slopes(model.config.n_head, "cpu"))
    with (
        with_attention(model, modeling.BloomAttention, forward=attending),
        swapped(modeling.BloomGelu, forward=gate),
    ):
        yield
