"""Drafter random: every token is equally likely. It is the floor that theory gives for any draft."""

from collections.abc import Callable

from torch import Tensor

from ..state.frame import DraftedLine, Frame
from ..state.rows import Rows
from .drafter import Sampler


class Random(Sampler):
    name = "random"
    always_unsure = True

    def logits(self, rows: Rows, frame: Frame, line: DraftedLine) -> Callable[[int], Tensor]:
        alike = frame.draft_logits.new_zeros(frame.draft_logits.shape)
        return lambda i: alike
