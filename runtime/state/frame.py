"""The fixed tensors of a round, bound to the engines: made once for each shape and only filled after that.

verify        reads the last committed token and all proposals, and may read look-aheads beside them
draft models  read what their drafter's `prepare` says: first the last two committed tokens, so that no entry
              is missing;
              or all that one round commits, where proposals may be accepted that are not their own;
              then its own proposals one by one, or all of a tree again and again while it grows
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...engines import ALIGNMENT, Step
from ..memory.model import Model
from ..memory.tokens import Absorbs, Tokens, preceded
from .indexing import counting
from .look_aheads import LookAheads
from .place import on_host
from .plan import LEAST_WINDOW, Plan, Prepared
from .rows import Rows
from .verdict import Verdict, Winners


class Frame:
    """Each shape of a round has a frame. Its tensors are valid until its next round, its logits until the next step."""

    def __init__(self, plan: Plan, target: Model, *, prefilled: bool = False) -> None:
        batch, k, device = plan.batch, plan.draft_length, target.engine.device
        self.on_host = on_host(device)
        self.draft_length, self.batch, self.entries_read, self.since = k, batch, plan.entries_read, plan.since
        drafts = plan.drafts if plan.levels else ()  # that read trees, too
        self._caches = [model.cache for model in (target, *drafts)]
        self.nodes = plan.nodes(torch.device(device))
        width = k + plan.beyond + 1
        self._offset = torch.arange(-2, k + 2, device=device)[:, None]
        # Row i is length - 2 + i, never negative where a draft reads it; each begins at an address aligned as engines
        # demand.
        aligned = ALIGNMENT // torch.int64.itemsize
        self.position = torch.zeros(k + 4, -(-batch // aligned) * aligned, dtype=torch.int64, device=device)[:, :batch]
        self.index = self.position[2:-1].t()  # [A, K+1], where the round's tokens go
        self.next_length = self.position[3]  # the next length if no proposal is accepted
        self._start = self.position[1]  # of the last committed token

        input_ids = torch.zeros(batch, width, dtype=torch.int64, device=device)
        reads_best = plan.picks_best and not self.on_host
        narrow = reads_best and not prefilled  # the best of narrow logits are those of widened ones
        dtype = getattr(torch, target.engine.logits_dtype) if narrow else torch.float32
        logits = target.logits(batch, width + plan.look_aheads, dtype)
        self.widths = torch.full((batch,), k + 1, device=device)  # tokens of each row to verify; ragged rounds write it
        if prefilled:  # the reading of a prompt has given the logits
            self.verify = Step({}, {}, lambda: None)
        else:
            tokens = Tokens(input_ids, self._start, 0, plan.entries_read, self.widths, self.nodes.ancestry)
            fill = None
            if plan.look_aheads:
                ahead = LookAheads(input_ids, plan.look_aheads, target.engine.contract.vocab_size, self.nodes)
                tokens, fill = replace(tokens, ids=ahead.ids, widths=None, ancestry=ahead), ahead.fill
            step = target.step(tokens, logits, absorbs=Absorbs(plan.since), best_alone=plan.picks_best)
            self.verify = step if fill is None else preceded(fill, step)
        self.target_logits = logits[:, :width, : target.vocab_size]  # [A, N+1, V]; what lies beyond is padding
        self.said_ahead = logits[:, width:, : target.vocab_size] if plan.look_aheads else None  # [A, T, V]
        self.input_ids = input_ids  # [A, N+1]
        self.all_proposed = input_ids[:, 1:]
        self.branches = input_ids[:, k + 1 : k + 1 + plan.branches]  # [A, B], of rows that have some
        # What follows the nodes of a level is drawn after a step that reads the whole tree; the last reads only.
        widths = [1, *(1 + level.branches for level in plan.levels[:-1]), 1][:k] if plan.levels else []
        levels = [torch.zeros(batch, width, dtype=torch.int64, device=device) for width in widths]
        self.nothing = torch.zeros(batch, dtype=torch.int64, device=device)

        self.verdict = Verdict(self.target_logits, k, reads_best=reads_best)
        # What the host finds NaN in: the logits, or those of the tokens by their type. None: the device does.
        self.unchecked = self.target_logits if self.on_host else self.target_logits.dtype if reads_best else None

        self.recent = torch.zeros(batch, 2, dtype=torch.int64, device=device) if k else input_ids
        self._recent_index = self.position[2 - self.recent.shape[1] : 2].t()
        self.window = Window(plan, device) if plan.window > LEAST_WINDOW else None
        self._keeps_images = k > 0 and target.images is not None
        if any(plan.samplers):
            self.draft_model = plan.drafts[0] if plan.drafts else None
            if self.draft_model is not None:
                self.draft_memory = self.draft_model.logits(batch, 1)
            else:  # no model runs: all tokens are equally likely
                self.draft_memory = torch.zeros(batch, 1, target.vocab_size, device=device)
            self.draft_logits = self.draft_memory[..., : target.vocab_size]  # [A, 1, V]
        self.lines: list[DraftedLine] = []
        for number, drafters in enumerate(plan.lines):
            winners = [self._winners() for _ in range(k)] if plan.samplers[number] else []
            if number:  # nothing grows beside the others
                line = DraftedLine(input_ids[:, 1 + number * k :][:, :k], winners)
            else:
                line = DraftedLine(input_ids[:, : k + 1], winners, [self.recent[:, -1:]], levels)
            # What is prepared keeps tensors and not the frame: that would keep old caches until gc finds them.
            line.prepared = {one.name: one.prepare(self, line) for one in drafters if one.needs_model}
            self.lines.append(line)
        self.draft_runs = {name: one.steps for line in self.lines for name, one in line.prepared.items()}

    def _winners(self) -> Winners:
        return Winners(
            self.draft_logits, torch.zeros(self.batch, 1, dtype=torch.int64, device=self.draft_logits.device)
        )

    def begin(self, rows: Rows) -> None:
        """Load the lengths and last tokens of the rows."""
        torch.add(rows.length, self._offset, out=self.position)
        if self.draft_length:  # else nothing reads what may lie before the first token
            self.position.clamp_(min=0)
        if self._keeps_images:
            torch.maximum(self.position[0], rows.images_end, out=self.position[0])
        torch.gather(rows.tokens, 1, self._recent_index, out=self.recent)
        if self.window is not None:
            self.window.begin(rows)

    def settle(self) -> None:
        """Move the caches' entries of the accepted path, so that each follows the one before."""
        self.nodes.settle(self.verdict, self._caches, self._start)


class DraftedLine:
    """The part of a frame that belongs to the drafters of one line of proposals."""

    def __init__(
        self,
        tokens: Tensor,
        winners: Sequence[Winners],
        before: Sequence[Tensor] = (),
        levels: Sequence[Tensor] = (),
    ) -> None:
        self.proposed = tokens[:, len(before) :]  # [A, K]
        self.winners = winners  # one for each of the K proposals, if they are sampled
        self.levels = levels  # [A, P] each, the nodes that a draft reads together where branches grow beside it
        self.prepared: dict[str, Prepared] = {}
        self._columns = [*before, *(one.tokens for one in winners)]
        self._filled = tokens[:, : len(self._columns)]

    def line_up(self) -> None:
        """Write the sampled proposals after what comes before them."""
        if self._columns:
            torch.cat(self._columns, 1, out=self._filled)


class Window:
    """The last committed tokens, for a draft model that has not seen those that another line proposed.

    A sequence may be shorter: the tokens that would come after it are garbage, and nothing sees them.
    """

    def __init__(self, plan: Plan, device: str) -> None:
        width, whole = plan.window, partial(torch.zeros, dtype=torch.int64, device=device)
        self.tokens = whole(plan.batch, width)
        self.start = whole(plan.batch)
        self.last = whole(plan.batch, 1)  # where the last committed token is
        self._places = counting(width, torch.device(device))

    def begin(self, rows: Rows) -> None:
        torch.sub(rows.length, len(self._places), out=self.start)
        torch.maximum(self.start, rows.images_end, out=self.start)
        torch.gather(rows.tokens, 1, self.start[:, None] + self._places, out=self.tokens)
        torch.sub(rows.length - 1, self.start, out=self.last[:, 0])
