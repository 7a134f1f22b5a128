"""Logit bias: a request adds to the scores of single tokens."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from ..checks import LARGEST, real, require, whole
from .filter import Ahead, Change, Columns, wide, widened

if TYPE_CHECKING:
    from ..params import SamplingParams


class Bias(Change):
    fields: ClassVar = {"logit_bias": "add this to the score of one token"}

    def check(self, params: "SamplingParams") -> None:
        bias = params.logit_bias
        sound = isinstance(bias, Mapping) and all(
            whole(key, 0) and (real(value, -LARGEST, LARGEST) or value == -math.inf) for key, value in bias.items()
        )
        require(
            "logit_bias", bias, sound, f"a mapping of token ids to -inf or numbers from {-LARGEST:g} to {LARGEST:g}"
        )

    def active(self, params: "SamplingParams") -> bool:
        return bool(params.logit_bias)

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        return {"bias": wide(rows, vocab_size, device)}

    def admit(
        self, columns: Columns, row: int, params: "SamplingParams", prompt: Sequence[int], vocab_size: int
    ) -> None:
        if params.logit_bias:
            columns["bias"] = widened(columns["bias"], vocab_size)
        columns["bias"][row] = 0
        for token, bias in params.logit_bias.items():
            columns["bias"][row, token] = bias

    def apply(self, scores: Tensor, columns: Columns, ahead: Ahead | None) -> Tensor:
        return scores + columns["bias"][:, None]
