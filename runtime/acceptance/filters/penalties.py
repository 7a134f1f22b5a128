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
        counts = proposed.counts(columns["output_counts"], scores.shape[1])
        seen = (counts + columns["prompt_counts"][:, None]) > 0
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(seen, repeated, scores)
        return scores - counts * frequency - (counts > 0) * presence

    def commit(self, columns: Columns, tokens: Tensor, accepted: Tensor) -> None:
        committed = torch.arange(tokens.shape[1], device=tokens.device) <= accepted[:, None]
        columns["output_counts"].scatter_add_(1, tokens, committed.float())
