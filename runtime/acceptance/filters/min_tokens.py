"""Minimum length: until an output has so many tokens, it may sample neither end-of-sequence nor stop tokens."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...state.proposal import Ahead
from ...state.rows import Columns
from ..parameters import Parameters, told
from .filter import Change, wide, widened


class MinTokens(Change):
    """The decoder adds the end-of-sequence tokens of its bundle to the stop tokens of a request that asks for this."""

    fields: ClassVar = told("min_tokens")
    reads_ahead = reads_trees = True

    def active(self, params: Parameters) -> bool:
        return params.min_tokens > 0

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        counts = {name: torch.zeros(rows, dtype=torch.int64, device=device) for name in ("tokens_said", "min_tokens")}
        return counts | {"stops": wide(rows, vocab_size, device)}

    def admit(self, columns: Columns, row: int, params: Parameters, prompt: Sequence[int], vocab_size: int) -> None:
        columns["tokens_said"][row] = 0
        columns["min_tokens"][row] = params.min_tokens
        if self.active(params):
            columns["stops"] = widened(columns["stops"], vocab_size)
        columns["stops"][row] = 0
        if self.active(params):
            columns["stops"][row, list(params.stop_token_ids)] = 1

    def apply(self, scores: Tensor, columns: Columns, ahead: Ahead | None) -> Tensor:
        assert ahead is not None
        before = columns["tokens_said"][:, None] + places_of(scores, ahead)  # [A, W]
        short = before < columns["min_tokens"][:, None]
        return scores.masked_fill(short[:, :, None] & (columns["stops"] > 0)[:, None], -torch.inf)

    def commit(self, columns: Columns, tokens: Tensor, accepted: Tensor) -> None:
        columns["tokens_said"].add_(accepted).add_(1)


def places_of(scores: Tensor, ahead: Ahead) -> Tensor:
    """Return how many tokens of this round stand before each position: [A, W], or [W] where no row has a tree."""
    if ahead.tree is None:
        first = ahead.tokens.shape[1] - (scores.shape[1] - 1)
        return torch.arange(first, first + scores.shape[1], device=scores.device)
    depths = ahead.tree.depths
    return depths if ahead.nodes is None else depths.gather(1, ahead.nodes)
