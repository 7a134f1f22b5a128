"""Minimum length: until an output has so many tokens, it may sample neither end-of-sequence nor stop tokens."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...state.proposal import ProposedTokens
from ...state.rows import Columns
from ..parameter_fields import ParameterFields, help_for
from .filter import Change, wide, widened


class MinTokens(Change):
    """The decoder adds the end-of-sequence tokens of its bundle to the stop tokens of a request that asks for this."""

    fields: ClassVar = help_for("min_tokens")
    reads_proposals = reads_trees = True

    def active(self, params: ParameterFields) -> bool:
        return params.min_tokens > 0

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        counts = {name: torch.zeros(rows, dtype=torch.int64, device=device) for name in ("tokens_said", "min_tokens")}
        return counts | {"stops": wide(rows, vocab_size, device)}

    def admit(
        self, columns: Columns, row: int, params: ParameterFields, prompt: Sequence[int], vocab_size: int
    ) -> None:
        columns["tokens_said"][row] = 0
        columns["min_tokens"][row] = params.min_tokens
        if self.active(params):
            columns["stops"] = widened(columns["stops"], vocab_size)
        columns["stops"][row] = 0
        if self.active(params):
            columns["stops"][row, list(params.stop_token_ids)] = 1

    def apply(self, scores: Tensor, columns: Columns, proposed: ProposedTokens | None) -> Tensor:
        assert proposed is not None
        before = columns["tokens_said"][:, None] + proposed.places(scores.shape[1])  # [A, W]
        short = before < columns["min_tokens"][:, None]
        return scores.masked_fill(short[:, :, None] & (columns["stops"] > 0)[:, None], -torch.inf)

    def commit(self, columns: Columns, tokens: Tensor, accepted: Tensor) -> None:
        columns["tokens_said"].add_(accepted).add_(1)
