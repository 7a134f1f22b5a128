"""The calls by which the graph of a head of blocks is checked: a block after each token of a text."""

from typing import Any

import torch
from torch import Tensor

from ...engines import Engine
from .written import GARBAGE, Cached

LARGEST = 32  # tokens of a block
AGAIN = 4  # tokens that are read again before a block


def said_in_blocks(engine: Engine, block: Any, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
    """Return what a graph says after each token but the first, as rounds read them, and its hidden states.

    They are [L - 1, proposals, V] and [L - 1, proposals, hidden].

    Each call reads some tokens again, which the block before has overwritten, and after a block there may be tokens
    that belong to nothing.
    """
    length = len(tokens)
    cached = Cached.of(engine, 1, length + 2 * LARGEST + AGAIN)
    found = []
    for anchor in range(1, length):
        begin = max(0, anchor + 1 - AGAIN)
        read = tokens[begin : anchor + 1]
        masks = torch.full((block.size - 1,), block.mask)
        slack = torch.zeros(anchor % 3, dtype=torch.int64)
        ids = torch.cat([read, tokens[anchor : anchor + 1], masks, slack])[None]
        given = torch.full((1, ids.shape[1], features.shape[1]), GARBAGE)
        first = int(begin == 0)
        given[0, first : len(read)] = features[begin + first - 1 : anchor]
        rows = torch.arange(len(read), ids.shape[1] - len(slack))[None, block.size - block.proposals :]
        found.append(cached.call(ids, [begin], given, rows))
    logits, states = zip(*found, strict=True)
    return torch.cat(logits), torch.cat(states)
