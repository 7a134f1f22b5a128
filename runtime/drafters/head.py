"""Drafters that run a head: a draft that reads what the target has made of each token, then its own hidden states.

What it has written from its own hidden states belongs to tokens that the target had not read yet. Once the target has,
it reads again all that a round has committed.
"""

from collections.abc import Callable
from functools import cached_property, partial
from sys import maxsize

import torch
from torch import Tensor

from ...engines import Step
from ..memory.tokens import Tokens, preceded
from ..state.frame import DraftedLine, Frame
from ..state.indexing import at_nodes, counting, pick
from ..state.rows import Rows
from ..state.tree import Tree
from .asking import Asking
from .model import DraftModel, PreparedDraft

GIVEN, MADE = "past_hidden", "present_hidden"


class Head(DraftModel):
    usual = False

    def prepare(self, frame: Frame, line: DraftedLine) -> PreparedDraft:
        """Make K steps as of a draft model; each after the first is given hidden states that the last one has made."""
        assert self.model is not None
        tokens, memory = partial(Tokens, entries_read=frame.entries_read), self._memory(frame)
        logits = memory[..., : self.model.vocab_size]
        steps, given = [self._first(frame, memory)], [logits]
        states = States(steps[0], frame) if len(line.levels) > 1 else None
        for before, level in zip(line.levels, line.levels[1:], strict=False):
            assert states is not None
            own = self.model.logits(*level.shape)
            tree = tokens(frame.input_ids, frame.position[1], ancestry=frame.nodes.ancestry)
            read = self.model.step(tree, own, level, hidden=states.given)
            steps.append(preceded(partial(states.hand_on, before, steps[-1].outputs[MADE]), read))
            given.append(own[..., : self.model.vocab_size])
        for i in range(len(steps), frame.draft_length):
            last = tokens(line.winners[i - 1].tokens, frame.position[i + 1])
            steps.append(self.model.step(last, memory, hidden=steps[-1].outputs[MADE]))
            given.append(logits)
        return PreparedDraft(steps, given)


class States:
    """The hidden states of a tree that grows: each node is given that of the node which it follows."""

    def __init__(self, first: Step, frame: Frame) -> None:
        assert isinstance(frame.nodes, Tree)
        self._parents = frame.nodes.parents
        self._root = first.inputs[GIVEN]  # [A, S, size], features of the target
        self._last = frame.window.last[:, 0] if frame.window else None  # where the root is among those; None: last
        size = self._root.shape[2]
        self._made = torch.zeros(frame.batch, frame.input_ids.shape[1], size, dtype=self._root.dtype).to(
            self._root.device
        )
        self.given = torch.zeros_like(self._made)  # [A, N+1, size]

    def hand_on(self, nodes: Tensor, made: Tensor) -> None:
        """Give what was made of these nodes [A, P] to those that follow them."""
        self._made.scatter_(1, nodes[:, :, None].expand_as(made), made)
        self.given[:, 1:] = at_nodes(self._made, self._parents)
        self.given[:, 0] = self._root[:, -1] if self._last is None else pick(self._root, self._last)


class Eagle3(Head):
    name = "eagle3"


class Mtp(Head):
    name = "mtp"


class OnePass(Head):
    """Says all proposals of a round in one pass, so that none knows what the others are."""

    @property
    def most(self) -> int:
        """How many proposals it can make in its engine; a neighbour's line may be longer."""
        raise NotImplementedError

    def ready(self, request: Asking, most: int, turn: int) -> int:
        return min(most, self.most)

    def said(self, step: Step, logits: Tensor, frame: Frame, line: DraftedLine) -> PreparedDraft:
        """Give the logits [A, M, V] of a step to the proposals; in a tree all nodes of a level have the same.

        Those beyond the M have the last logits, and nobody asks for them.
        """
        nodes = [level.shape[1] for level in line.levels]
        nodes += [1] * (frame.draft_length - len(nodes))
        last = logits.shape[1] - 1
        places = [logits[:, min(i, last), None].expand(-1, n, -1) for i, n in enumerate(nodes)]
        return PreparedDraft([step], places)

    def logits(self, rows: Rows, frame: Frame, line: DraftedLine) -> Callable[[int], Tensor]:
        prepared = line.prepared[self.name]
        assert isinstance(prepared, PreparedDraft)

        def of_proposal(i: int) -> Tensor:
            if i == 0:
                prepared.steps[0].run()
            return prepared.logits[i]

        return of_proposal


class ParallelHeads(OnePass):
    """Heads that say the token of one place each; they read the last features and keep nothing."""

    @cached_property
    def most(self) -> int:
        assert self.model is not None
        engine = self.model.engine
        return max((m for m in range(1, engine.contract.layers + 1) if engine.runs(1, m)), default=0)

    def window(self, widest: int) -> int:
        return maxsize  # it has nothing to catch up with

    def reads_first(self, window: int) -> bool:
        return True

    def prepare(self, frame: Frame, line: DraftedLine) -> PreparedDraft:
        assert self.model is not None
        model, most, device = self.model, min(frame.draft_length, self.most), line.proposed.device
        memory = model.logits(frame.batch, most)
        speak = counting(most, device).expand(frame.batch, most).contiguous()
        ids = torch.zeros(frame.batch, 1, dtype=torch.int64, device=device)
        tokens = Tokens(ids, frame.position[1], entries_read=frame.entries_read)
        step = model.step(tokens, memory, speak)
        return self.said(step, memory[..., : model.vocab_size], frame, line)


class Medusa(ParallelHeads):
    name = "medusa"


class Blockwise(ParallelHeads):
    name = "blockwise"
