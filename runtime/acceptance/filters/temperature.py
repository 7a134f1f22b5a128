"""Temperature of a request and of its draft, which may sample cooler or greedily; 0 is greedy."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...state.proposal import ProposedTokens
from ...state.rows import Columns
from ..parameter_fields import ParameterFields, help_for
from .filter import Change, cut_below


class Temperature(Change):
    fields: ClassVar = help_for("temperature", "draft_temperature")

    def active(self, params: ParameterFields) -> bool:
        return params.temperature not in (0, 1)

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        # The depth is how far below its best score a draft samples: inf, or 0 if only the draft is greedy.
        return {name: torch.zeros(rows, device=device) for name in ("temperature", "draft_temperature", "draft_depth")}

    def admit(
        self, columns: Columns, row: int, params: ParameterFields, prompt: Sequence[int], vocab_size: int
    ) -> None:
        columns["temperature"][row] = params.temperature or 1.0
        columns["draft_temperature"][row] = params.own_draft_temperature or 1.0
        columns["draft_depth"][row] = 0.0 if params.own_draft_temperature == 0 and not params.greedy else torch.inf

    def apply(self, scores: Tensor, columns: Columns, proposed: ProposedTokens | None) -> Tensor:
        return scores / columns["temperature"][:, None, None]


def at_the_drafts_own(columns: Columns) -> Columns:
    """Return the columns with the draft's temperature in place of the request's."""
    return columns | {"temperature": columns["draft_temperature"]}


def cut_to_depth(scores: Tensor, columns: Columns) -> Tensor:
    return cut_below(scores, scores.amax(-1, keepdim=True) - columns["draft_depth"][:, None, None])
