"""A suffix automaton knows all substrings of a text and adds one more token in amortised constant time.

So the longest earlier match of the text's end is known after every round, however long it is.
"""

from collections.abc import Iterator, Sequence

MATCHES = 64  # searched, ever shorter, for other continuations; a text of one repeated token has as many as tokens


class SuffixAutomaton:
    """Holds the latest tokens. States are numbers; the root is 0.

    A state stands for all substrings that end at the same set of positions; the longest has `_length` tokens. `_link`
    is the state of their longest suffix that also occurs elsewhere. `_end` is where one occurrence ends.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.read = 0  # all tokens so far, including forgotten ones
        self._begin()

    def _begin(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._end = [-1], [0], [-1]
        self._last = 0
        self.matched = 0  # tokens in the longest suffix of the text that occurred before
        self.match_end = -1  # index where that earlier occurrence ends

    def extend(self, tokens: Sequence[int]) -> None:
        self.read += len(tokens)
        for token in tokens[-self._limit :]:
            if len(self.tokens) == self._limit:  # forget the older half: two steps a token on average
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
        """Split from `seen` the strings that also end here, which are one token longer than those of `state`."""
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
        """Return the length of the longest suffix of `context` that occurs in the text, and the state it is in."""
        state = matched = 0
        for token in context:
            while state and token not in self._next[state]:
                state = self._link[state]
                matched = self._length[state]
            if token in self._next[state]:
                state, matched = self._next[state][token], matched + 1
        return matched, state

    def end(self, state: int) -> int:
        """Return the end of one occurrence of the state's strings."""
        return self._end[state]

    @property
    def repeated(self) -> int:
        """The state of the longest suffix of the text that occurred before."""
        return self._link[self._last]

    def following(self, matched: int, state: int) -> Iterator[tuple[int, int]]:
        """Yield how many tokens a match has, and the index of a token that followed it.

        Each token that ever followed this match comes once, the latest first, as far as is known; then those that
        followed ever shorter ones.
        """
        for _ in range(MATCHES):
            if state <= 0:
                return
            for index in sorted((self._end[after] for after in self._next[state].values()), reverse=True):
                yield matched, index
            state = self._link[state]
            matched = self._length[state]
