"""Drafter pass: the pass in which the target verifies a round also says what the next one proposes (PaSS).

After the last committed token the target reads look-aheads, for which it was given embeddings: the distribution of the
first is of the place after the next token, and so on. Accepted proposals take as many of these places. The
distributions of the others are kept for the row, and the next round draws its proposals from them: so each q is known.

They follow that token alone. A group after each proposal would take (K + 1)² places a pass instead of 2K + 2,
and say more only after an acceptance; after the last proposal alone it would say nothing after a rejection.

A row proposes nothing in a round of which no look-aheads were read before: the first after its prompt, or after a
round without them.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ...engines import MAX_DRAFT_LENGTH
from ..state.frame import DraftedLine, Frame
from ..state.indexing import at_nodes, counting
from ..state.rows import Columns, Rows
from .asking import Asking
from .drafter import Resources, Sampler

SAID, COUNT, LENGTH = "pass_said", "pass_count", "pass_length"


class Pass(Sampler):
    name = "pass"
    usual = False
    may_come_short = True
    looks_ahead = True

    def __init__(self, place: int, resources: Resources) -> None:
        super().__init__(place, resources)
        self._most = resources.bundle.target.look_aheads
        self._away: WeakKeyDictionary[Asking, Columns] = WeakKeyDictionary()  # what those know that gave up their rows

    @property
    def treeless(self) -> str | None:
        return "can grow no tree, since it may know fewer places than that has levels"

    @classmethod
    def unavailable(cls, resources: Resources) -> str | None:
        if lacking := super().unavailable(resources):
            return lacking
        count, engine = resources.bundle.target.look_aheads, resources.target.engine
        if not engine.takes_trees or engine.verify_width < 1 + MAX_DRAFT_LENGTH + count:
            return (
                "drafter pass needs steps whose tokens branch, as wide as a long line and its look-aheads together, "
                "which this engine or its plans lack; use onnxruntime or torch, or drafter lookup or none"
            )
        return None

    # On the host, between rounds.

    def ready(self, request: Asking, most: int, turn: int) -> int:
        return min(most, self._most)

    def look_aheads(self, length: int) -> int:
        """One more than it proposes, so that something is left where one is accepted."""
        return min(length + 1, self._most)

    def columns(self, rows: int) -> Columns:
        device = self.target.engine.device
        return {
            SAID: torch.zeros(rows, self._most, self.target.vocab_size, device=device),  # logits
            COUNT: torch.zeros(rows, dtype=torch.int64, device=device),  # places that are still to come
            LENGTH: torch.zeros(rows, dtype=torch.int64, device=device),  # of the row, after which they are
        }

    def seated(self, request: Asking, rows: Rows, row: int) -> None:
        kept = self._away.pop(request, None)
        for name in (SAID, COUNT, LENGTH):
            rows.columns[name][row] = 0 if kept is None else kept[name]

    def gave_up(self, request: Asking, rows: Rows, row: int) -> None:
        self._away[request] = {name: rows.columns[name][row].clone() for name in (SAID, COUNT, LENGTH)}

    # On the device.

    def asked(self, line: int, rows: Rows) -> Tensor:
        known = rows.columns[COUNT] * (rows.columns[LENGTH] == rows.length)
        return torch.minimum(super().asked(line, rows), known)

    def logits(self, rows: Rows, frame: Frame, line: DraftedLine) -> Callable[[int], Tensor]:
        said, levels = rows.columns[SAID], [level.shape[1] for level in line.levels]

        def of_proposal(i: int) -> Tensor:
            place = min(i, self._most - 1)  # beyond, nobody asks for them
            return said[:, place : place + 1].expand(-1, levels[i] if i < len(levels) else 1, -1)

        return of_proposal

    def keep(self, rows: Rows, frame: Frame) -> None:
        """Keep what the look-aheads say of places still to come, for the rows that asked for some."""
        assert frame.said_ahead is not None
        accepted, count = frame.verdict.accepted, frame.said_ahead.shape[1]
        places = (accepted[:, None] + counting(count, accepted.device)).clamp_(max=count - 1)
        rows.columns[SAID][:, :count].copy_(at_nodes(frame.said_ahead, places))
        own = rows.asked[:, :, self.place].amax(1)  # those that are read for longer neighbours say nothing
        read = (own + 1).clamp_(max=self._most) * (own > 0)
        torch.sub(read, accepted, out=rows.columns[COUNT]).clamp_(min=0)
        rows.columns[LENGTH].copy_(rows.length)
