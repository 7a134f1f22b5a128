"""Min-p: only tokens at least this likely relative to the likeliest one may be sampled."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...state.rows import Columns
from ..parameter_fields import ParameterFields, help_for
from .filter import Cut


class MinP(Cut):
    fields: ClassVar = help_for("min_p")

    def active(self, params: ParameterFields) -> bool:
        return params.filtered and params.min_p > 0

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        return {"log_min_p": torch.zeros(rows, device=device)}  # -inf when off

    def admit(
        self, columns: Columns, row: int, params: ParameterFields, prompt: Sequence[int], vocab_size: int
    ) -> None:
        columns["log_min_p"][row] = torch.tensor(params.min_p).log()

    def threshold(self, ordered: Tensor, kept: Tensor, columns: Columns) -> Tensor:
        return ordered[..., -1:] + columns["log_min_p"][:, None, None]
