"""What the exact tests read and write of a round: its proposals, all that these are judged by, and the verdict."""

from typing import NamedTuple

from torch import Tensor

from ..state.plan import Plan
from ..state.proposal import Noise, Proposal
from ..state.rows import Rows
from ..state.verdict import Verdict


class Exam(NamedTuple):
    proposal: Proposal
    scores: Tensor  # [A, N+1, V] of the target after each node, as the requests transform them
    rows: Rows
    plan: Plan
    noise: Noise
    verdict: Verdict  # which is written
    p: Tensor | None = None  # [A, N+1, V], the softmax of the scores, if some rule needs it

    def of_line(self) -> "Exam":
        """Return the exam of the first line, as if it were alone."""
        k, p = self.plan.draft_length, self.p
        proposal = self.proposal._replace(tokens=self.proposal.tokens[:, :k])
        return self._replace(proposal=proposal, scores=self.scores[:, : k + 1], p=None if p is None else p[:, : k + 1])
