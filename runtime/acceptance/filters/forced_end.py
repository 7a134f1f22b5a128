"""Forced end: the last token that an output may have is an end of sequence, as some encoder–decoders ask for."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ...state.proposal import ProposedTokens
from ...state.rows import Columns
from ..checks import require, whole
from ..parameter_fields import ParameterFields
from .filter import Change, wide, widened

NEVER = 2**62  # the place of a last token that is not forced


class ForcedEnd(Change):
    """The decoder asks for it, in `extra`, where its bundle does; it overrules all that changes scores before it."""

    fields: ClassVar = {"forced_end": "the tokens of which one ends an output that becomes as long as it may"}
    reads_proposals = reads_trees = True

    def check(self, params: ParameterFields) -> None:
        ids = params.extra.get("forced_end", ())
        sound = isinstance(ids, Sequence) and all(whole(one, 0) for one in ids)
        require("forced_end", ids, sound, "a list of token ids")

    def active(self, params: ParameterFields) -> bool:
        return bool(params.extra.get("forced_end"))

    def columns(self, rows: int, vocab_size: int, device: str) -> Columns:
        counts = {name: torch.zeros(rows, dtype=torch.int64, device=device) for name in ("said_so_far", "last_place")}
        return counts | {"last_tokens": wide(rows, vocab_size, device)}

    def admit(
        self, columns: Columns, row: int, params: ParameterFields, prompt: Sequence[int], vocab_size: int
    ) -> None:
        columns["said_so_far"][row] = 0
        columns["last_place"][row] = params.max_new_tokens - 1 if self.active(params) else NEVER
        if self.active(params):
            columns["last_tokens"] = widened(columns["last_tokens"], vocab_size)
        columns["last_tokens"][row] = 0
        if self.active(params):
            columns["last_tokens"][row, list(params.extra["forced_end"])] = 1

    def apply(self, scores: Tensor, columns: Columns, proposed: ProposedTokens | None) -> Tensor:
        assert proposed is not None
        before = columns["said_so_far"][:, None] + proposed.places(scores.shape[1])  # [A, W]
        last = (before == columns["last_place"][:, None])[:, :, None]
        ends = (columns["last_tokens"] > 0)[:, None]
        return scores.masked_fill(last & ends, 0.0).masked_fill(last & ~ends, -torch.inf)

    def commit(self, columns: Columns, tokens: Tensor, accepted: Tensor) -> None:
        columns["said_so_far"].add_(accepted).add_(1)
