"""Drafter cascade: lookup proposes to the draft model, and the outcome of that exact test is proposed to the target.

One pass of the draft model tests the copied tokens just as the target tests any proposal. The accepted tokens and the
one that follows them are therefore distributed as if the draft model had sampled them one by one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ...engines import MAX_DRAFT_LENGTH
from ..acceptance.accept import accept
from ..acceptance.transform import draft_transform
from ..memory.tokens import Absorbs, Tokens
from ..state.frame import DraftedLine, Frame
from ..state.indexing import counting
from ..state.plan import Plan, Prepared
from ..state.proposal import Exam, Noise, Proposal, ProposedTokens
from ..state.rows import Rows
from ..state.verdict import Verdict
from .drafter import Copier, Offer, Resources
from .lookup import look_up


@dataclass
class PreparedCascade(Prepared):
    """The draft model's pass [A, K + 1], its logits [A, K, V] and the verdict on them.

    Where other rows grow trees there are two passes, over the last two tokens [A, 2] and over whole trees [A, N + 1]:
    the padding of a line would overwrite the entries of branches.
    """

    logits: Tensor
    verdict: Verdict


class Cascade(Copier):
    name = "cascade"
    needs_model = True
    may_come_short = True
    beside_others = False
    in_words = "lookup and draft {draft} in cascade"

    @classmethod
    def unavailable(cls, resources: Resources) -> str | None:
        if lacking := super().unavailable(resources):
            return lacking
        name = cls.model_name(resources.bundle)
        assert name is not None
        ours = resources.drafts[name].engine.verify_width
        needed = min(resources.target.engine.verify_width, MAX_DRAFT_LENGTH + 1)
        if ours < needed:
            return (
                f"the draft model gives logits for {ours} tokens a step here, drafter cascade needs as many as the "
                "target gives; compile its plans with trt-spec build --draft-trees, or use drafter model"
            )
        return None

    def prepare(self, frame: Frame, line: DraftedLine) -> PreparedCascade:
        assert self.model is not None
        k, model = frame.draft_length, self.model
        memory = model.logits(frame.batch, k)
        logits = memory[..., : model.vocab_size]
        tokens, absorbs = partial(Tokens, entries_read=frame.entries_read), Absorbs(frame.since)
        if line.levels:
            first = tokens(frame.recent, frame.position[0])
            tree = tokens(frame.input_ids, frame.position[1], ancestry=frame.nodes.ancestry)
            each = counting(k, memory.device).expand(frame.batch, k).contiguous()
            steps = [
                model.step(first, model.logits(frame.batch, 1), absorbs=absorbs),
                model.step(tree, memory, each, absorbs=Absorbs(goes_on=True)),
            ]
        else:
            input_ids = torch.zeros(frame.batch, k + 1, dtype=torch.int64, device=model.engine.device)
            steps = [model.step(tokens(input_ids, frame.position[0]), memory, absorbs=absorbs)]
        return PreparedCascade(steps, logits=logits, verdict=Verdict(logits))

    def offer(self, rows: Rows, plan: Plan, frame: Frame, noise: Noise, span: int) -> Callable[[int], Offer]:
        """Test the copies; rows with other proposals are fed these, so that their caches keep the same content."""
        k, line = plan.draft_length, frame.lines[0]
        prepared = line.prepared[self.name]
        assert isinstance(prepared, PreparedCascade)
        verdict, asked = prepared.verdict, self.asked(0, rows)
        [(copied, found)] = look_up(rows, plan, span)
        guesses = torch.where(asked[:, None] > 0, copied[:, : k - 1], line.proposed[:, : k - 1])
        if line.levels:
            line.proposed[:, : k - 1] = guesses
        else:
            torch.cat([frame.recent, guesses], 1, out=prepared.steps[0].input_ids)
        for step in prepared.steps:
            step.run()
        inner = replace(plan, draft_length=k - 1, ragged=True, lenient=False)
        proposal = Proposal(guesses, (asked - 1).clamp(min=0) * found, None)
        scores = draft_transform(prepared.logits, rows, inner, ProposedTokens(guesses))
        # This test uses the uniforms that would draw the draft's tokens one by one: the first one draws, the others
        # test. The outer test has uniforms of its own. Under the coupled rule both tests use the noise of the index.
        gumbel = None if noise.gumbel is None else noise.gumbel[:, :k]
        draw, test = (None, None) if noise.draw is None else (noise.draw[:, :1], noise.draw[:, 1:])
        accept(Exam(proposal, scores, rows, inner, Noise(gumbel, draw, test), verdict))
        verdict.tokens.clamp_(max=scores.shape[2] - 1)  # NaN logits lead beyond the vocabulary
        outcome = Offer(verdict.tokens, torch.where(asked > 0, verdict.accepted + 1, 0), verdict.target_probabilities)
        return lambda line: outcome
