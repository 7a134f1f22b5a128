"""Drafter text: a draft with tokens of its own writes some text, and proposes the target's tokens for it.

It writes greedily between two rounds. What it proposes is certain, as a copy is: each token is accepted as often as the
target would say it.
"""

from collections.abc import Callable, Sequence
from math import ceil

import torch
from torch import Tensor

from ...engines import MAX_DRAFT_LENGTH
from ..state.frame import Frame
from ..state.plan import Plan
from ..state.proposal import Noise
from ..state.rows import Rows
from .asking import Asking
from .drafter import Copier, Offer, Resources
from .foreign_draft import Steps
from .foreign_drafter import ForeignDrafter

MOST = 2 * MAX_DRAFT_LENGTH + 1  # tokens that it writes in a round


class Text(ForeignDrafter, Copier):
    name = "text"

    def __init__(self, place: int, resources: Resources) -> None:
        super().__init__(place, resources)
        size, device = (resources.max_batch, MAX_DRAFT_LENGTH), resources.target.engine.device
        self._tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self._counts = torch.zeros(resources.max_batch, dtype=torch.int64, device=device)

    def load(self, requests: Sequence[Asking], draft_length: int) -> None:
        wanted = self.wanted()
        written = {request: self._to_write(request, count) for request, count in wanted.items()}
        steps, able = self.draft.read(requests, wanted, max(written[one] for one in requests if one in written))
        said = write(steps)
        for row, request in enumerate(requests):
            if able[row]:
                self.draft.note(request, said[row][:-1])
                tokens = self.draft.text(request).said(said[row][: written[request]])[: wanted[request]]
                self._tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
                self._counts[row] = len(tokens)
            else:
                self._counts[row] = 0

    def _to_write(self, request: Asking, count: int) -> int:
        """Return how many tokens it writes so that these make so many of the target's, and one more that ends them."""
        text = self.draft.text(request)
        return min(MOST, ceil(count * len(text.ids) / text.read) + 1)

    def offer(self, rows: Rows, plan: Plan, frame: Frame, noise: Noise, span: int) -> Callable[[int], Offer]:
        tokens, counts = self._tokens[: plan.batch, : plan.draft_length], self._counts[: plan.batch]
        return lambda line: Offer(tokens, torch.minimum(counts, self.asked(line, rows)))


def write(steps: Steps) -> list[list[int]]:
    """Let each row write its likeliest token in each step; return them, row by row."""
    said: list[Tensor] = []
    for i in range(len(steps.runs)):
        said.append(steps.run(i, said[-1] if said else None)[:, 0].argmax(-1))
    return torch.stack(said, 1).tolist()
