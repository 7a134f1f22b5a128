"""Drafter ngram: proposes from n-grams counted in a text, without the cost of a model."""

from collections.abc import Callable

import torch
from torch import Tensor

from ...engines import Bundle
from ..state.frame import DraftedLine, Frame
from ..state.rows import Rows
from .drafter import Resources, Sampler
from .ngram_table import has_ngrams, read_ngrams


class NGram(Sampler):
    name = "ngram"
    in_mixed = True

    def __init__(self, place: int, resources: Resources) -> None:
        super().__init__(place, resources)
        self._table = read_ngrams(resources.bundle, resources.target.engine.device)

    @classmethod
    def unavailable(cls, resources: Resources) -> str | None:
        return None if has_ngrams(resources.bundle) else no_ngrams(resources.bundle)

    def logits(self, rows: Rows, frame: Frame, line: DraftedLine) -> Callable[[int], Tensor]:
        index = rows.length[:, None] + torch.arange(-self._table.longest, 0, device=rows.length.device)
        history = rows.tokens.gather(1, index.clamp(min=0)).masked_fill_(index < 0, -1)  # -1 before the first token

        def of_proposal(i: int) -> Tensor:
            proposed = (winners.tokens for winners in line.winners[:i])
            return self._table.after(torch.cat([history, *proposed], 1)[:, i:]).log()[:, None]

        return of_proposal


def no_ngrams(bundle: Bundle) -> str:
    return f"the bundle has no table of n-grams; count one with trt-spec ngram --bundle {bundle.path} --text FILE"
