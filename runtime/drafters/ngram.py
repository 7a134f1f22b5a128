"""Drafter ngram: proposes from n-grams counted in a text, without the cost of a model."""

from collections.abc import Callable

import torch
from torch import Tensor

from ..state.frame import DraftedLine, Frame
from ..state.rows import Rows
from .drafter import Resources, Sampler
from .ngram_table import read_ngrams


class NGram(Sampler):
    name = "ngram"
    in_mixed = True

    def __init__(self, place: int, resources: Resources) -> None:
        super().__init__(place, resources)
        self._table = read_ngrams(resources.bundle, resources.target.engine.device)

    def logits(self, rows: Rows, frame: Frame, line: DraftedLine) -> Callable[[int], Tensor]:
        index = rows.length[:, None] + torch.arange(-self._table.longest, 0, device=rows.length.device)
        history = rows.tokens.gather(1, index.clamp(min=0)).masked_fill_(index < 0, -1)  # -1 before the first token

        def of_proposal(i: int) -> Tensor:
            proposed = (winners.tokens for winners in line.winners[:i])
            return self._table.after(torch.cat([history, *proposed], 1)[:, i:]).log()[:, None]

        return of_proposal
