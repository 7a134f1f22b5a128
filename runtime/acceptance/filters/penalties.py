"""Penalties for tokens that were said before: repetition counts prompt and output, the other two the output alone."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...state.proposal import ProposedTokens
from ...state.rows import Columns
from ..parameter_fields import ParameterFields, help_for
from .filter import Change, wide, widened


class Penalties(Change):
    fields: ClassVar = help_for("repetition_penalty", "presence_penalty", "frequency_penalty")
    reads_proposals = reads_trees = True

    def active(self, params: ParameterFields) -> bool:
        return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        return {name: torch.zeros(rows, device=device) for name in ("repetition", "presence", "frequency")} | {
            name: wide(rows, vocab_size, device) for name in ("prompt_counts", "output_counts")
        }

    def admit(
        self, columns: Columns, row: int, params: ParameterFields, prompt: Sequence[int], vocab_size: int
    ) -> None:
        columns["repetition"][row] = params.repetition_penalty
        columns["presence"][row] = params.presence_penalty
        columns["frequency"][row] = params.frequency_penalty
        if self.active(params):
            for name in ("prompt_counts", "output_counts"):
                columns[name] = widened(columns[name], vocab_size)
        columns["output_counts"][row] = 0
        if columns["prompt_counts"].shape[1]:
            counts = torch.zeros(vocab_size).scatter_add_(0, torch.tensor(prompt), torch.ones(len(prompt)))
            columns["prompt_counts"][row] = counts

    def apply(self, scores: Tensor, columns: Columns, proposed: ProposedTokens | None) -> Tensor:
        assert proposed is not None
        repetition, presence, frequency = (columns[n][:, None, None] for n in ("repetition", "presence", "frequency"))
        counts = counts_at_each_position(columns["output_counts"], proposed, scores.shape[1])
        seen = (counts + columns["prompt_counts"][:, None]) > 0
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen, repeated, scores)
        return scores - counts * frequency - (counts > 0) * presence

    def commit(self, columns: Columns, tokens: Tensor, accepted: Tensor) -> None:
        committed = torch.arange(tokens.shape[1], device=tokens.device) <= accepted[:, None]
        columns["output_counts"].scatter_add_(1, tokens, committed.float())


def counts_at_each_position(before: Tensor, proposed: ProposedTokens, width: int) -> Tensor:
    """Return how often each token is in the output [A, W, V], as plain decoding would have it at each position.

    `before` [A, V] counts what was committed.
    """
    tokens, tree, nodes = proposed
    if tree is not None:
        said = torch.zeros(*tokens.shape, before.shape[1], device=before.device).scatter_(2, tokens[:, :, None], 1.0)
        ancestors = tree.ancestors[:, :, 1:]
        if nodes is not None:
            ancestors = ancestors.gather(1, nodes[:, :, None].expand(-1, -1, tokens.shape[1]))
        return before[:, None] + ancestors.float() @ said
    first = tokens.shape[1] - (width - 1)  # so many come before the first position
    if first:
        before = before.scatter_add(1, tokens[:, :first], torch.ones_like(tokens[:, :first], dtype=before.dtype))
    if width == 1:
        return before[:, None]
    counts = torch.zeros(len(before), width, before.shape[1], device=before.device)
    counts[:, 1:].scatter_(2, tokens[:, first:, None], 1.0)
    return before[:, None] + counts.cumsum(1)
