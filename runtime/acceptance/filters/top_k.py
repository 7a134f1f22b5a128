"""Top-k: only the k likeliest tokens may be sampled. Tokens tied with the last one kept stay."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...state.rows import Columns
from ..parameter_fields import ParameterFields, help_for
from .filter import Cut


class TopK(Cut):
    fields: ClassVar = help_for("top_k")

    def active(self, params: ParameterFields) -> bool:
        return params.filtered and params.top_k > 0

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        return {"top_k": torch.zeros(rows, dtype=torch.int64, device=device)}

    def admit(
        self, columns: Columns, row: int, params: ParameterFields, prompt: Sequence[int], vocab_size: int
    ) -> None:
        columns["top_k"][row] = min(params.top_k or vocab_size, vocab_size)

    def threshold(self, ordered: Tensor, kept: Tensor, columns: Columns) -> Tensor:
        kth = (ordered.shape[2] - columns["top_k"])[:, None, None].expand(-1, ordered.shape[1], 1)
        return ordered.gather(2, kth)
