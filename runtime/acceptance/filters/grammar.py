"""Grammar: only tokens with which the text can still become one of the request's language may be sampled."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from ...grammars.guide import ANYTHING, GUIDES, Bits, bytes_for
from ...state.place import on_host
from ...state.proposal import ProposedTokens
from ...state.rows import Columns
from ..parameter_fields import ParameterFields, help_for
from .filter import Change

EACH_BIT = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
HIGHEST = np.where(EACH_BIT, np.float32(np.inf), np.float32(-np.inf))  # [256, 8] scores that the bits of a byte allow


class Allowed(Change):
    """Asks the guide of each row. That is Python on the host, so a round with a grammar is never recorded."""

    fields: ClassVar = help_for("grammar")
    reads_proposals = reads_trees = on_host = True

    def active(self, params: ParameterFields) -> bool:
        return params.grammar is not None

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        return {"guide": torch.zeros(rows, dtype=torch.int64)}  # its number, on the host; 0: none

    def admit(
        self, columns: Columns, row: int, params: ParameterFields, prompt: Sequence[int], vocab_size: int
    ) -> None:
        columns["guide"][row] = 0

    def apply(self, scores: Tensor, columns: Columns, proposed: ProposedTokens | None) -> Tensor:
        assert proposed is not None
        batch, width, vocab_size = scores.shape
        bits = np.full((batch, width, bytes_for(vocab_size)), ANYTHING, np.uint8)
        for row, number in enumerate(columns["guide"].tolist()):
            for walk in proposed.walks(row, width) if number else ():
                bits[row, walk.positions] = GUIDES[number].allowed(walk.said, walk.width)
        return exclude(scores, bits)


def exclude(scores: Tensor, bits: Bits) -> Tensor:
    """Return scores [A, W, V] that are -inf for all tokens but those of `bits` [A, W, B]."""
    vocab_size, device = scores.shape[2], scores.device
    if on_host(device):  # few operations on few bytes: code and data are cold after a model has read its weights
        highest = HIGHEST.take(bits, 0).reshape(*bits.shape[:2], -1)[..., :vocab_size]
        return torch.minimum(scores, torch.from_numpy(highest))
    sent = torch.from_numpy(bits).to(device)  # an eighth of a byte for each token
    return torch.where(unpacked(sent, vocab_size), scores, -torch.inf)


def unpacked(bits: Tensor, vocab_size: int) -> Tensor:
    """Return whether each bit is set, [A, W, V], by operations of torch alone."""
    single = (bits[..., None] >> torch.arange(8, dtype=torch.uint8, device=bits.device)) & 1
    return single.flatten(-2)[..., :vocab_size].bool()
