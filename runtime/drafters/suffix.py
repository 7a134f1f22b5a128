"""Drafter suffix: copies what followed the longest match in the request's own context or in earlier outputs.

The host finds the matches. The longer the match, the more tokens it proposes. A predicted output is part of the
context: the end of the prompt leads into it, and after each miss the next match finds the way back. Drafter suffix2 and
its like copy other continuations of that match, then continuations of shorter ones.
"""

from collections.abc import Iterator, Sequence
from heapq import merge
from itertools import repeat
from weakref import WeakKeyDictionary

import torch

from ...engines import MAX_DRAFT_LENGTH
from ..acceptance.params import SamplingParams
from ..state.frame import Frame
from ..state.plan import Plan
from ..state.proposal import Noise
from ..state.rows import Rows
from .drafter import Asking, Copier, Offer, Resources, continuations
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
        self.others: WeakKeyDictionary[Asking, Iterator[list[int]]] = WeakKeyDictionary()  # further continuations
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
        self.others.pop(request, None)  # these hold its context
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
        found, matches = [], [(context, context.matched, context.repeated)]  # of equally long ones its own comes first
        if reads_pool(request.params):
            matched, state = self._pool.find(context.tokens[-LONGEST_MATCH:])
            matches.append((self._pool, matched, state))
            if matched > context.matched:
                found = copied(self._pool, self._pool.end(state) + 1, matched, most)
        found = found or copied(context, context.match_end + 1, context.matched, most)
        self.others[request] = other_continuations(found, matches, most)
        return found


def further_suffix(number: int) -> type[Suffix]:
    """Make the drafter of continuation `number`, counted from 1."""
    *better, own = continuations(Suffix.name, number)

    class FurtherSuffix(Suffix):
        name = own
        before = tuple(better)

        def __init__(self, place: int, resources: Resources) -> None:
            super().__init__(place, resources)
            first = resources.opened[Suffix.name]
            assert isinstance(first, Suffix)
            self.others = first.others

        def suggest(self, request: Asking, most: int) -> list[int]:
            """Return the next of the continuations that this round's match of the first one has led to."""
            return next(self.others[request], [])

    return FurtherSuffix


def copied(text: SuffixAutomaton, start: int, matched: int, most: int) -> list[int]:
    """Return what the text has from `start` on; if it ends too early, the copy repeats itself."""
    tokens = text.tokens
    found = [tokens[start + ahead % (len(tokens) - start)] for ahead in range(min(most, PER_MATCHED_TOKEN * matched))]
    return found[: found.index(END)] if END in found else found


def other_continuations(
    first: Sequence[int], matches: Sequence[tuple[SuffixAutomaton, int, int]], most: int
) -> Iterator[list[int]]:
    """Yield other texts that followed these matches, after the longest first, each with a first token of its own."""
    begun = {END, *first[:1]}
    each = (zip(repeat(text), text.following(matched, state)) for text, matched, state in matches)
    for text, (matched, index) in merge(*each, key=lambda one: -one[1][0]):
        if text.tokens[index] not in begun:
            begun.add(text.tokens[index])
            yield copied(text, index, matched, most)


def reads_pool(params: SamplingParams) -> bool:
    """Whether a request may copy earlier outputs; it may not if its draft affects a text that is promised.

    Such a text must not depend on other requests, nor on an earlier output of the same seed, which came from the very
    noise that is to judge it.
    """
    return not params.keeps_its_draft
