"""Drafter model: a draft model proposes one token after another; model2 and its like run a bundle's further drafts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ...engines import Step
from ..memory.tokens import Absorbs, Tokens
from ..state.frame import DraftedLine, Frame
from ..state.plan import Prepared
from ..state.rows import Rows
from .drafter import Sampler


@dataclass
class PreparedDraft(Prepared):
    """The draft model's steps, and the logits [A, P, V] that each step gives and the next one overwrites."""

    logits: list[Tensor]


class DraftModel(Sampler):
    name = "model"
    needs_model = True
    in_mixed = True
    in_words = "draft {draft}"

    @property
    def treeless(self) -> str | None:
        assert self.model is not None
        if not self.model.engine.takes_trees:
            return super().treeless
        ours, needed = self.model.engine.verify_width, self.target.engine.verify_width
        if ours < needed:
            return (
                f"can grow no tree here, where its steps give logits for {ours} tokens and the target's for {needed}; "
                "compile its plans with trt-spec build --draft-trees"
            )
        return None

    def window(self, widest: int) -> int:
        return widest

    def prepare(self, frame: Frame, line: DraftedLine) -> PreparedDraft:
        """Make K steps: the first reads the last committed tokens, step i reads proposal i - 1.

        While trees grow, the steps after the first read whole trees instead.
        """
        assert self.model is not None
        tokens, memory = partial(Tokens, entries_read=frame.entries_read), self._memory(frame)
        logits = memory[..., : self.model.vocab_size]
        steps, given = [self._first(frame, memory)], [logits]
        for level in line.levels[1:]:
            own = self.model.logits(*level.shape)
            tree = tokens(frame.input_ids, frame.position[1], ancestry=frame.nodes.ancestry)
            steps.append(self.model.step(tree, own, level, absorbs=Absorbs(goes_on=True)))
            given.append(own[..., : self.model.vocab_size])
        for i in range(len(steps), frame.draft_length):
            last = tokens(line.winners[i - 1].tokens, frame.position[i + 1])
            steps.append(self.model.step(last, memory, absorbs=Absorbs(i + 1, goes_on=True)))
            given.append(logits)
        return PreparedDraft(steps, given)

    def _memory(self, frame: Frame) -> Tensor:
        """Return memory for the logits of one token of each row."""
        assert self.model is not None
        if frame.draft_model is self.model:
            return frame.draft_memory
        return self.model.logits(frame.batch, 1)  # another draft comes first and writes to the frame's

    def _first(self, frame: Frame, memory: Tensor) -> Step:
        """Make the step that reads the last committed tokens."""
        assert self.model is not None
        if (window := frame.window) is None:
            tokens = Tokens(frame.recent, frame.position[0], entries_read=frame.entries_read)
            return self.model.step(tokens, memory, absorbs=Absorbs(frame.since))
        tokens = Tokens(window.tokens, window.start, entries_read=frame.entries_read)
        return self.model.step(tokens, memory, window.last)

    def logits(self, rows: Rows, frame: Frame, line: DraftedLine) -> Callable[[int], Tensor]:
        prepared = line.prepared[self.name]
        assert isinstance(prepared, PreparedDraft)

        def of_proposal(i: int) -> Tensor:
            prepared.steps[i].run()
            return prepared.logits[i]

        return of_proposal


def further_draft(number: int) -> type[DraftModel]:
    """Make the drafter of draft `number` of a bundle, counted from 1; drafter mixed leaves it out."""

    class FurtherDraft(DraftModel):
        name = f"model{number}"
        which_draft = number - 1
        usual = False
        in_mixed = False

    return FurtherDraft
