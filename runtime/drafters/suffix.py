"""Drafter suffix: copies what followed the longest match in the request's own context or in earlier outputs.

The host finds the matches. The longer the match, the more tokens it proposes. A predicted output is part of the
context: the end of the prompt leads into it, and after each miss the next match finds the way back.
"""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch

from ...engines import MAX_DRAFT_LENGTH
from ..round.frame import Frame
from ..round.plan import Plan
from ..round.rows import Rows
from ..sampling.acceptance import Noise
from ..sampling.params import SamplingParams
from .drafter import Asking, Copier, Offer, Resources
from .suffix_automaton import SuffixAutomaton

CONTEXT, POOL = 2**14, 2**14  # tokens remembered of one request, and of all earlier outputs together
LONGEST_MATCH = 32  # tokens at the end of the context that are looked up in the pool
OPENING = 8  # tokens at the end of a prompt that the pool keeps before its output
PER_MATCHED_TOKEN = 2  # proposals
END = -1  # marks the end of an output in the pool; it is no token


class Suffix(Copier):
    name = "suffix"
    reads_outputs = True
    in_mixed = True
    costs_as = "lookup"  # both copy

    def __init__(self, place: int, resources: Resources) -> None:
        super().__init__(place, resources)
        self._pool = SuffixAutomaton(POOL)
        self._contexts: WeakKeyDictionary[Asking, SuffixAutomaton] = WeakKeyDictionary()
        self._found: WeakKeyDictionary[Asking, list[int]] = WeakKeyDictionary()  # for the next round
        self._tokens = torch.zeros(
            resources.max_batch, MAX_DRAFT_LENGTH, dtype=torch.int64, device=resources.target.engine.device
        )

    def ready(self, request: Asking, most: int) -> int:
        found = self._found[request] = self.suggest(request, most)
        return len(found)

    def load(self, requests: Sequence[Asking], draft_length: int) -> None:
        padded = [(self._found.get(one, []) + [0] * draft_length)[:draft_length] for one in requests]
        self._tokens[: len(padded), :draft_length] = torch.tensor(padded)

    def ended(self, request: Asking) -> None:
        if self._contexts.pop(request, None) is not None:
            self._pool.extend([*request.prompt[-OPENING:], *request.token_ids, END])

    def forget(self) -> None:
        self._pool = SuffixAutomaton(POOL)

    def offer(self, rows: Rows, plan: Plan, frame: Frame, noise: Noise, span: int) -> Offer:
        return Offer(self._tokens[: plan.batch, : plan.draft_length], self.asked(rows))

    def suggest(self, request: Asking, most: int) -> list[int]:
        """Return at most `most` tokens: fewer after a short match, none without a match."""
        predicted = len(request.prompt[-OPENING:]) + len(request.prediction) + 1 if request.prediction else 0
        context = self._contexts.get(request)
        if context is None:
            context = self._contexts[request] = SuffixAutomaton(CONTEXT)
            if predicted:
                context.extend([*request.prompt[-OPENING:], *request.prediction, END])
            context.extend(request.prompt)
        context.extend(request.token_ids[context.read - predicted - len(request.prompt) :])
        if reads_pool(request.params):
            matched, end = self._pool.find(context.tokens[-LONGEST_MATCH:])
            if matched > context.matched:
                count = min(most, PER_MATCHED_TOKEN * matched)
                found = self._pool.tokens[end + 1 : end + 1 + count]
                if found := found[: found.index(END)] if END in found else found:
                    return found
        # If the match ends less than `count` tokens ago, the copy repeats itself.
        tokens, start = context.tokens, context.match_end + 1
        count = min(most, PER_MATCHED_TOKEN * context.matched)
        found = [tokens[start + ahead % (len(tokens) - start)] for ahead in range(count)]
        return found[: found.index(END)] if END in found else found


def reads_pool(params: SamplingParams) -> bool:
    """Whether a request may copy earlier outputs; it may not if its text can depend on its proposals.

    Then it must not depend on other requests, nor on an earlier output of its own seed: such proposals came from the
    very noise that is to judge them.
    """
    return not params.keeps_its_draft
