"""Drafters that read masks after the last committed token, and say the tokens of their places, all in one pass.

pard, peagle    a mask for each proposal but the first, which the last committed token says
dflash          a block of as many as the head was trained with, all of which see each other
dspark          such a block, whose tokens follow one another: each is drawn by the one before it, too
"""

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from ...engines import MAX_DRAFT_LENGTH, Masks
from ..memory.tokens import Absorbs, Tokens, preceded
from ..state.frame import DraftedLine, Frame
from ..state.indexing import counting
from ..state.plan import LEAST_WINDOW
from ..state.rows import Rows
from .drafter import Resources
from .head import MADE, OnePass
from .markov import Markov
from .model import PreparedDraft


class Masked(OnePass):
    def __init__(self, place: int, resources: Resources) -> None:
        super().__init__(place, resources)
        name = self.model_name(resources.bundle)
        assert name is not None
        masks = resources.bundle.models[name].masks
        assert masks is not None
        self._masks = masks

    @cached_property
    def most(self) -> int:
        longest = self._masks.most or MAX_DRAFT_LENGTH
        return max((m for m in range(1, longest + 1) if self._runs(LEAST_WINDOW, m)), default=0)

    def reads_first(self, window: int) -> bool:
        return super().reads_first(window) and self._runs(window, min(window - 1, self.most))

    def _runs(self, window: int, proposals: int) -> bool:
        assert self.model is not None
        return self.model.engine.runs(window + self._masks.reads(proposals), proposals)

    def prepare(self, frame: Frame, line: DraftedLine) -> PreparedDraft:
        assert self.model is not None
        device, window = line.proposed.device, frame.window
        most = min(frame.draft_length, self.most)
        if window is None:
            tokens, start = frame.recent, frame.position[0]
            last = torch.ones(frame.batch, 1, dtype=torch.int64, device=device)
        else:
            tokens, start, last = window.tokens, window.start, window.last
        ids = torch.zeros(frame.batch, tokens.shape[1] + self._masks.reads(most), dtype=torch.int64, device=device)
        memory = self.model.logits(frame.batch, most)
        rows = torch.zeros(frame.batch, most, dtype=torch.int64, device=device)
        given = Tokens(ids, start, entries_read=frame.entries_read)
        step = self.model.step(given, memory, rows, absorbs=Absorbs(frame.since))
        step = preceded(filling(self._masks, most, tokens, last, ids, rows), step)
        return self.said(step, memory[..., : self.model.vocab_size], frame, line)


def filling(masks: Masks, most: int, tokens: Tensor, last: Tensor, ids: Tensor, rows: Tensor) -> Callable[[], None]:
    """Make a function that fills the ids [A, W + …] and the rows [A, M] that give logits.

    Of the tokens [A, W] those up to `last` [A, 1] are committed. Places beyond what is read are no masks, and nothing
    sees them.
    """
    device, width = ids.device, tokens.shape[1]
    places = counting(ids.shape[1], device)
    offsets = counting(most, device) + masks.first
    read, no_mask = masks.reads(most), int(masks.token == 0)

    def fill() -> None:
        beyond = places - last  # [A, W + …]
        ids.fill_(masks.token)
        ids[:, :width].copy_(torch.where(beyond[:, :width] <= 0, tokens, masks.token))
        if masks.repeats:
            torch.where(beyond == 1, tokens.gather(1, last), ids, out=ids)
        ids.masked_fill_(beyond > read, no_mask)
        torch.add(last, offsets, out=rows)

    return fill


class Pard(Masked):
    """A draft model of its own that was trained to read masks; drafter model runs it token by token."""

    name = "pard"


class PEagle(Masked):
    name = "peagle"


class DFlash(Masked):
    name = "dflash"


class DSpark(Masked):
    name = "dspark"

    def __init__(self, place: int, resources: Resources) -> None:
        super().__init__(place, resources)
        self._markov = Markov.read(resources.bundle, self.name, resources.target.engine.device)

    def logits(self, rows: Rows, frame: Frame, line: DraftedLine) -> Callable[[int], Tensor]:
        """Give each proposal its distribution after the one drawn before it: that is its q, in lines and trees."""
        of_place = super().logits(rows, frame, line)
        return lambda i: self._markov.following(of_place(i), before(i, frame, line))

    def doubt(self, i: int, logits: Tensor, frame: Frame, line: DraftedLine) -> Tensor:
        """Return how unlikely the head thinks proposal i of the line is to be accepted, if those before it are."""
        if not len(self._markov.confidence):
            return super().doubt(i, logits, frame, line)
        made = line.prepared[self.name].steps[0].outputs[MADE]
        place = min(i, made.shape[1] - 1)
        return 1 - self._markov.sure(made[:, place, None], before(i, frame, line)[:, :1])


def before(i: int, frame: Frame, line: DraftedLine) -> Tensor:
    """Return the tokens [A, P] that proposal i follows: of the line, then of what is beside it in a tree."""
    if i < len(line.levels):
        return frame.input_ids.gather(1, line.levels[i])
    return line.winners[i - 1].tokens if i else frame.recent[:, -1:]
