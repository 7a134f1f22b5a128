"""What followed the same words before, in the request's own context or in earlier outputs, found on the host.

A suffix automaton of a text knows all its substrings and takes amortised constant time for a token more, so that the
longest match is at hand after every round, however long it is. The longer the match, the more is proposed.
"""

from collections.abc import Sequence
from typing import Protocol

from ..sampling.params import SamplingParams

CONTEXT, POOL = 2**14, 2**14  # tokens that are remembered of a request, and of all earlier outputs together
LONGEST_MATCH = 32  # tokens that are looked for in the pool
OPENING = 8  # tokens of a prompt that are remembered before its output
PER_MATCHED_TOKEN = 2  # proposals
END = -1  # of an output in the pool, no token


class SuffixAutomaton:
    """Of the latest tokens; states are numbers, the root is 0.

    A state stands for the substrings that end at the same positions, up to `_length` tokens long; `_link` is the state
    of the shorter ends of those that occur elsewhere too; `_end` is where one occurrence ends.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.read = 0  # tokens so far, those forgotten included
        self._begin()

    def _begin(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [-1]
        self._last = 0
        self.matched = 0  # tokens of the longest end of the text that occurred before
        self.match_end = -1  # index of the last of them there

    def extend(self, tokens: Sequence[int]) -> None:
        self.read += len(tokens)
        for token in tokens[-self._limit :]:
            if len(self.tokens) == self._limit:  # forget the older half; on average that costs two steps a token
                younger = self.tokens[self._limit // 2 :]
                self._begin()
                for kept in younger:
                    self._append(kept)
            self._append(token)

    def _append(self, token: int) -> None:
        position = len(self.tokens)
        self.tokens.append(token)
        new = self._add({}, self._length[self._last] + 1, 0, position)
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            seen = self._next[state][token]
            if self._length[seen] > self._length[state] + 1:
                seen = self._split(seen, state, token)
            self._link[new] = seen
        self._last = new
        repeated = self._link[new]
        self.matched, self.match_end = self._length[repeated], self._end[repeated]
        self._end[repeated] = position

    def _split(self, seen: int, state: int, token: int) -> int:
        """Part the strings of `seen` that end here too, one token longer than those of `state`, from longer ones."""
        shorter = self._add(self._next[seen].copy(), self._length[state] + 1, self._link[seen], self._end[seen])
        while state >= 0 and self._next[state].get(token) == seen:
            self._next[state][token] = shorter
            state = self._link[state]
        self._link[seen] = shorter
        return shorter

    def _add(self, following: dict[int, int], length: int, link: int, end: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._end.append(end)
        return len(self._next) - 1

    def find(self, context: Sequence[int]) -> tuple[int, int]:
        """How long the longest end of `context` is that occurs in the text, and where it ends there."""
        state = matched = 0
        for token in context:
            while state and token not in self._next[state]:
                state = self._link[state]
                matched = self._length[state]
            if token in self._next[state]:
                state, matched = self._next[state][token], matched + 1
        return matched, self._end[state]


class Drafted(Protocol):
    """What is read of a request."""

    prompt: tuple[int, ...]
    token_ids: list[int]
    params: SamplingParams
    context: SuffixAutomaton | None


class Suffixes:
    """Suggests proposals from the context of a request and from one pool of earlier outputs."""

    def __init__(self) -> None:
        self._pool = SuffixAutomaton(POOL)

    def suggest(self, request: Drafted, most: int) -> list[int]:
        """At most so many tokens, fewer after a short match and none without one."""
        context = request.context = request.context or SuffixAutomaton(CONTEXT)
        prompt = len(request.prompt)
        if context.read < prompt:
            context.extend(request.prompt[context.read :])
        context.extend(request.token_ids[context.read - prompt :])
        if reads_pool(request.params):
            matched, end = self._pool.find(context.tokens[-LONGEST_MATCH:])
            if matched > context.matched:
                count = min(most, PER_MATCHED_TOKEN * matched)
                found = self._pool.tokens[end + 1 : end + 1 + count]
                if found := found[: found.index(END)] if END in found else found:
                    return found
        # A match that ends less than that many tokens ago goes on into its own copy, as repetition does.
        tokens, start = context.tokens, context.match_end + 1
        count = min(most, PER_MATCHED_TOKEN * context.matched)
        return [tokens[start + ahead % (len(tokens) - start)] for ahead in range(count)]

    def remember(self, request: Drafted) -> None:
        """An output that has ended."""
        self._pool.extend([*request.prompt[-OPENING:], *request.token_ids, END])
        request.context = None


def reads_pool(params: SamplingParams) -> bool:
    """Also because of noise: proposals that came of a request's own seed depend on what is to judge them."""
    return not params.keeps_its_draft
