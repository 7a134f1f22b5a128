"""Drafter suffix: copies what followed the longest match in the request's own context or in earlier outputs.

The host finds the matches. The longer the match, the more tokens it proposes. A predicted output is part of the
context: the end of the prompt leads into it, and after each miss the next match finds the way back. Further lines of a
row copy other continuations of that match, then continuations of shorter ones.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import repeat, zip_longest
from weakref import WeakKeyDictionary

import torch

from ...engines import MAX_DRAFT_LENGTH
from ..acceptance.sampling_params import SamplingParams
from ..state.frame import Frame
from ..state.plan import Plan
from ..state.proposal import Noise
from ..state.rows import Rows
from ..state.shapes import MOST_LINES
from .asking import Asking
from .drafter import Copier, Offer, Resources, of_turn
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
    has_copies = True
    copies_predictions = True
    costs_as = "lookup"  # both copy

    def __init__(self, place: int, resources: Resources) -> None:
        super().__init__(place, resources)
        self._pool = SuffixAutomaton(POOL)
        self._contexts: WeakKeyDictionary[Asking, SuffixAutomaton] = WeakKeyDictionary()
        self._found: WeakKeyDictionary[Asking, list[list[int]]] = WeakKeyDictionary()  # for the lines of the next round
        self._others: WeakKeyDictionary[Asking, Iterator[list[int]]] = WeakKeyDictionary()  # what else may follow
        self._tokens = torch.zeros(
            MOST_LINES,
            resources.max_batch,
            MAX_DRAFT_LENGTH,
            dtype=torch.int64,
            device=resources.target.engine.device,
        )

    def ready(self, request: Asking, most: int, turn: int) -> int:
        if not turn:
            self._found[request] = []
        found = next(self._others[request], []) if turn else self.suggest(request, most)
        self._found[request].append(found)
        return len(found)

    def load(self, requests: Sequence[Asking], draft_length: int) -> None:
        each = [[one for one in self._found.get(request, ()) if one] for request in requests]
        for copy, of_rows in enumerate(zip_longest(*each, fillvalue=list[int]())):
            padded = [(one + [0] * draft_length)[:draft_length] for one in of_rows]
            self._tokens[copy, : len(padded), :draft_length] = torch.tensor(padded)

    def ended(self, request: Asking) -> None:
        self._others.pop(request, None)  # these hold its context
        if self._contexts.pop(request, None) is not None:
            self._pool.extend([*request.prompt[-OPENING:], *request.token_ids, END])

    def forget(self) -> None:
        self._pool = SuffixAutomaton(POOL)

    def offer(self, rows: Rows, plan: Plan, frame: Frame, noise: Noise, span: int) -> Callable[[int], Offer]:
        copies = [self._tokens[copy, : plan.batch, : plan.draft_length] for copy in range(plan.lines_of(self))]
        return lambda line: Offer(of_turn(copies, rows, line), self.asked(line, rows))

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
        self._others[request] = other_continuations(found, matches, most)
        return found


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
