"""Drafter model: the draft model proposes one token after another."""

from collections.abc import Callable

from torch import Tensor

from ..round.frame import Frame, Prepared
from ..round.rows import Rows
from .drafter import Sampler


class DraftModel(Sampler):
    name = "model"
    needs_model = True
    in_mixed = True

    def prepare(self, frame: Frame) -> Prepared:
        """Make K steps: the first reads the last two committed tokens, step i reads proposal i - 1."""
        assert self._draft is not None
        inputs = [frame.recent, *(winners.tokens for winners in frame.winners[:-1])]
        starts = [frame.position[0], *frame.position[2 : frame.draft_length + 1]]
        return Prepared(
            [
                self._draft.step(0, input_ids, start, frame.draft_memory, frame.live)
                for input_ids, start in zip(inputs, starts, strict=True)
            ]
        )

    def logits(self, rows: Rows, frame: Frame) -> Callable[[int], Tensor]:
        steps = frame.prepared[self.name].steps

        def of_proposal(i: int) -> Tensor:
            steps[i].run()
            return frame.draft_logits

        return of_proposal
