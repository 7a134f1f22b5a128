"""Drafter common: a draft with tokens of its own proposes those that its target has, too, one after another.

It draws from its distribution over these alone: q is that distribution laid on the target's ids, and nothing anywhere
else.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..state.frame import DraftedLine, Frame
from ..state.rows import Rows
from .asking import Asking
from .drafter import Resources, Sampler
from .foreign_draft import Steps
from .foreign_drafter import ForeignDrafter

NEVER = -1e30  # logit of a token that the draft does not have; finite, so that a filter may leave only such tokens


class Common(ForeignDrafter, Sampler):
    name = "common"

    def __init__(self, place: int, resources: Resources) -> None:
        super().__init__(place, resources)
        translation, size, device = self.draft.translation, self.target.vocab_size, self.target.engine.device
        self._own = torch.zeros(size, dtype=torch.int64, device=device)  # of each of the target's tokens, 0 for none
        self._own[translation.target_ids] = translation.own_ids
        self._able = torch.zeros(resources.max_batch, dtype=torch.int64, device=device)
        self._steps: Steps | None = None

    def load(self, requests: Sequence[Asking], draft_length: int) -> None:
        self._steps, able = self.draft.read(requests, self.wanted(), draft_length)
        self._able[: len(able)] = torch.tensor(able)
        self.draft.launch(self._steps, requests, able)

    def asked(self, line: int, rows: Rows) -> Tensor:
        asked = super().asked(line, rows)
        return asked * self._able[: len(asked)]

    def logits(self, rows: Rows, frame: Frame, line: DraftedLine) -> Callable[[int], Tensor]:
        steps, translation = self._steps, self.draft.translation
        assert steps is not None

        def of_proposal(i: int) -> Tensor:
            said = self._own[line.winners[i - 1].tokens[:, 0]] if i else None
            own = steps.run(i, said).index_select(2, translation.own_ids)
            return torch.full_like(frame.draft_logits, NEVER).index_copy_(2, translation.target_ids, own)

        return of_proposal
