"""Top-p: only the smallest set of likeliest tokens that holds this much probability may be sampled."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ....engines import WIDEST_STEP
from ...state.rows import Columns
from ..parameter_fields import ParameterFields, help_for
from ..sums import rising_sums
from .filter import Cut


class TopP(Cut):
    fields: ClassVar = help_for("top_p")
    reads_kept = True

    def active(self, params: ParameterFields) -> bool:
        return params.filtered and params.top_p < 1

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        # 1 - top_p, the mass that may be left out, at each position of the widest step; -1 when off.
        return {"unlikely": torch.zeros(rows, WIDEST_STEP, 1, device=device)}

    def admit(
        self, columns: Columns, row: int, params: ParameterFields, prompt: Sequence[int], vocab_size: int
    ) -> None:
        columns["unlikely"][row] = 1 - params.top_p if params.top_p < 1 else -1.0

    def threshold(self, ordered: Tensor, kept: Tensor, columns: Columns) -> Tensor:
        unlikely = columns["unlikely"][:, : ordered.shape[1]].contiguous()
        dropped = torch.searchsorted(rising_sums(kept.softmax(-1), kept.dtype), unlikely, right=True)
        return ordered.gather(2, dropped.clamp_(max=ordered.shape[2] - 1))
