"""The fixed tensors of a round, bound to the engines: made once for each shape and only filled after that.

verify        reads the last committed token and all proposals
draft models  read what their drafter's `prepare` says: first the last two committed tokens, so that no entry is missing
"""

from dataclasses import dataclass

import torch

from ...engines import ALIGNMENT, Step
from ..memory.model import Model
from ..memory.row_cache import RowCache
from ..sampling.acceptance import Verdict, Winners
from ..sampling.combs import CombVerdict
from .comb import Comb
from .plan import Plan
from .rows import Rows


@dataclass
class Prepared:
    """The part of a frame that belongs to a drafter: the draft model's steps that it runs."""

    steps: list[Step]


class Frame:
    """Each shape of a round has a frame. Its tensors are valid until its next round, its logits until the next step."""

    def __init__(self, plan: Plan, target: Model, draft: Model | None, *, prefilled: bool = False) -> None:
        batch, k, device = plan.batch, plan.draft_length, target.engine.device
        self.on_cpu = device == "cpu"
        self.draft_length, self.batch, self.live = k, batch, plan.live
        self._target = target
        self.comb = Comb(batch, k, plan.siblings, torch.device(device)) if plan.siblings else None
        nodes = k + plan.siblings + 1
        self._offset = torch.arange(-2, k + 1, device=device)[:, None]
        # Row i is length - 2 + i, never negative; each row begins at an address aligned as engines demand.
        aligned = ALIGNMENT // torch.int64.itemsize
        width = -(-batch // aligned) * aligned
        self.position = torch.zeros(k + 3, width, dtype=torch.int64, device=device)[:, :batch]
        self.index = self.position[2:].t()  # [A, K+1], where the round's tokens go

        input_ids = torch.zeros(batch, nodes, dtype=torch.int64, device=device)
        logits = target.logits(batch, nodes)
        self.widths = torch.zeros(batch, dtype=torch.int64, device=device)  # tokens of each row that are verified
        if prefilled:  # the reading of a prompt has given the logits
            self.verify = Step({}, {}, lambda: None)
        else:
            self.verify = target.step(0, input_ids, self.position[1], logits, self.live, self.widths, comb=self.comb)
        self.target_logits = logits[..., : target.vocab_size]  # [A, K+M+1, V]; what lies beyond is padding
        self.proposed = input_ids[:, 1 : k + 1]  # [A, K]
        self.siblings = input_ids[:, k + 1 :]  # [A, M]
        self.all_proposed = input_ids[:, 1:]
        self.nothing = torch.zeros(batch, dtype=torch.int64, device=device)

        self.verdict = Verdict(self.target_logits) if self.comb is None else CombVerdict(self.target_logits, k)

        self.recent = torch.zeros(batch, 2, dtype=torch.int64, device=device) if k else input_ids
        self._recent_index = self.position[2 - self.recent.shape[1] : 2].t()
        self.winners: list[Winners] = []  # one for each of the K sampled proposals
        if plan.samplers:
            if draft is not None and plan.samplers[0].needs_model:
                self.draft_memory = draft.logits(batch, 1)
            else:  # no model runs: all tokens are equally likely
                self.draft_memory = torch.zeros(batch, 1, target.vocab_size, device=device)
            self.draft_logits = self.draft_memory[..., : target.vocab_size]  # [A, 1, V]
            for _ in range(k):
                token = torch.zeros(batch, 1, dtype=torch.int64, device=device)
                self.winners.append(Winners(self.draft_logits, token))
        self.prepared = {source.name: source.prepare(self) for source in plan.with_model}
        self.draft_runs = [step for one in self.prepared.values() for step in one.steps]
        self._columns = [self.recent[:, -1:], *(winners.tokens for winners in self.winners)]
        self._lined_up = input_ids[:, : len(self._columns)]

    def begin(self, rows: Rows) -> None:
        """Load the lengths and last tokens of the rows."""
        torch.add(rows.length, self._offset, out=self.position).clamp_(min=0)
        torch.gather(rows.tokens, 1, self._recent_index, out=self.recent)

    def settle(self) -> None:
        """Let the cache's entries of the path that stands follow one another."""
        verdict = self.verdict
        if isinstance(verdict, CombVerdict):
            off_line = verdict.last != verdict.accepted
            if not self.on_cpu or bool(off_line.any()):
                assert isinstance(self._target.cache, RowCache), "an engine that takes trees reads rows"
                self._target.cache.straighten(self.position[1], verdict.path)

    def line_up(self) -> None:
        """Write the sampled proposals behind the last committed token."""
        torch.cat(self._columns, 1, out=self._lined_up)
