"""The fixed tensors of a round: made once for a batch and K, only filled from then on, and bound to the engines.

draft step 0      reads the last two committed tokens, so that no cache entry is ever missing
draft step i      reads proposal i - 1
cascade           reads the last two committed tokens and what was copied, in one step
verify            reads the last committed token and all proposals
"""

import torch

from ...engines import ALIGNMENT, Step
from ..drafters.ngram import NGrams
from ..memory.model import Model
from ..sampling.acceptance import Verdict, Winners
from .rows import Plan, Rows


class Frame:
    """One for each shape of a round. Its tensors are valid until its next round, the logits until the next step."""

    def __init__(self, plan: Plan, target: Model, draft: Model | None, ngrams: NGrams | None = None) -> None:
        batch, k, device = plan.batch, plan.draft_length, target.engine.device
        self.on_cpu = device == "cpu"
        self.ngrams = ngrams
        self._offset = torch.arange(-2, k + 1, device=device)[:, None]
        # Row i is length - 2 + i, never negative; each begins where engines want an address to be.
        aligned = ALIGNMENT // torch.int64.itemsize
        width = -(-batch // aligned) * aligned
        self._position = torch.zeros(k + 3, width, dtype=torch.int64, device=device)[:, :batch]
        self.index = self._position[2:].t()  # [A, K+1], where the round's tokens go

        input_ids = torch.zeros(batch, k + 1, dtype=torch.int64, device=device)
        logits = target.logits(batch, k + 1)
        self.verify = target.engine.step(0, input_ids, self._position[1], logits)
        self.target_logits = logits[..., : target.vocab_size]  # [A, K+1, V]; what lies beyond is padding
        self.proposed = input_ids[:, 1:]  # [A, K]

        self.verdict = Verdict(self.target_logits)

        self.recent = torch.zeros(batch, 2, dtype=torch.int64, device=device) if k else input_ids
        self._recent_index = self._position[2 - self.recent.shape[1] : 2].t()
        self.drafts: list[Step] = []  # K steps of the draft model
        self.drafted: list[Winners] = []  # the K proposals that are sampled
        if plan.sampled:
            if draft is not None and plan.model:
                logits = draft.logits(batch, 1)
            else:  # all tokens are alike
                logits = torch.zeros(batch, 1, target.vocab_size, device=device)
            self.draft_logits = logits[..., : target.vocab_size]  # [A, 1, V]
            input_ids = self.recent
            for start in (self._position[0], *self._position[2 : k + 1]):
                if draft is not None and plan.model:
                    self.drafts.append(draft.engine.step(0, input_ids, start, logits))
                input_ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
                self.drafted.append(Winners(self.draft_logits, input_ids))
        self.draft_runs = list(self.drafts)  # all of the draft model
        if plan.cascade:
            assert draft is not None
            logits, input_ids = draft.logits(batch, k), torch.zeros(batch, k + 1, dtype=torch.int64, device=device)
            self.cascade = draft.engine.step(0, input_ids, self._position[0], logits)
            self.draft_runs.append(self.cascade)
            self.cascade_logits = logits[..., : draft.vocab_size]  # [A, K, V]
            self.cascaded = Verdict(self.cascade_logits)
        self._columns = [self.recent[:, -1:], *(winners.tokens for winners in self.drafted)]
        self._lined_up = self.verify.input_ids[:, : len(self._columns)]

    def begin(self, rows: Rows) -> None:
        """Take the lengths and last tokens of the rows."""
        torch.add(rows.length, self._offset, out=self._position).clamp_(min=0)
        torch.gather(rows.tokens, 1, self._recent_index, out=self.recent)

    def line_up(self) -> None:
        """Put what the draft proposed behind the last committed token."""
        torch.cat(self._columns, 1, out=self._lined_up)
