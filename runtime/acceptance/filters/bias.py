"""Logit bias: a request adds to the scores of single tokens, or allows some alone."""

import math
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from ...state.proposal import ProposedTokens
from ...state.rows import Columns
from ..parameter_fields import ParameterFields, help_for
from .filter import Change, wide, widened


class Bias(Change):
    fields: ClassVar = help_for("logit_bias", "allowed_token_ids")

    def active(self, params: ParameterFields) -> bool:
        return bool(params.logit_bias or params.allowed_token_ids)

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        return {"bias": wide(rows, vocab_size, device)}

    def admit(
        self, columns: Columns, row: int, params: ParameterFields, prompt: Sequence[int], vocab_size: int
    ) -> None:
        if self.active(params):
            columns["bias"] = widened(columns["bias"], vocab_size)
        fill(columns["bias"][row], params)

    def apply(self, scores: Tensor, columns: Columns, proposed: ProposedTokens | None) -> Tensor:
        return scores + columns["bias"][:, None]


def fill(bias: Tensor, params: ParameterFields) -> None:
    """Write what the request adds to the score of each token [V]."""
    bias[:] = -math.inf if params.allowed_token_ids else 0
    if params.allowed_token_ids:
        bias[list(params.allowed_token_ids)] = 0
    for token, added in params.logit_bias.items():
        bias[token] = added
