"""Walks a grammar along the tokens of one request, as far ahead as its proposals go, and back."""

from collections.abc import Callable, Collection, Sequence
from functools import wraps
from itertools import count
from time import thread_time
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from ...engines import WIDEST_STEP
from ...engines.errors import first_line

if TYPE_CHECKING:
    from llguidance import LLMatcher

Bits = NDArray[np.uint8]  # [..., B], a bit for each token
ANYTHING = 255  # all bits set
NO_TOKEN = "the vocabulary lacks what it asks for"
TOO_SLOW = "to find what may follow takes too long"

# Of the processor, for one request: a grammar that is ambiguous enough takes seconds a token, and stops all others.
MOST_SECONDS = 1.0
SECONDS_A_TOKEN = 0.01  # beyond that; a healthy grammar takes a tenth of a millisecond

P = ParamSpec("P")
R = TypeVar("R")

NUMBERS = count(1)
GUIDES: "WeakValueDictionary[int, Guide]" = WeakValueDictionary()  # by number, which a row of a tensor can hold


def counted(ask: Callable[Concatenate["Guide", P], R]) -> Callable[Concatenate["Guide", P], R]:
    """Add what a question takes to what its guide has spent."""

    @wraps(ask)
    def asked(guide: "Guide", /, *args: P.args, **more: P.kwargs) -> R:
        began = thread_time()
        try:
            return ask(guide, *args, **more)
        finally:
            guide.seconds += thread_time() - began

    return asked


class Guide:
    """Answers which tokens may follow the committed ones and any proposals after them.

    It is on a path beyond the committed tokens; each question walks only the part that the last one did not.
    A token that ends the output is never walked, because nothing that follows it counts. After i tokens of the path
    it is at place i, and what may follow there is in row i of `bits`.
    """

    def __init__(
        self, compiled: "LLMatcher", vocab_size: int, stop_ids: Collection[int], banned: Collection[int] = ()
    ) -> None:
        self.number = next(NUMBERS)
        GUIDES[self.number] = self
        self.error = ""  # why a committed token was refused
        self.seconds = 0.0  # of the processor that all questions have taken
        self._compiled, self._vocab_size, self._stop_ids = compiled, vocab_size, frozenset(stop_ids)
        size = bytes_for(vocab_size)
        self._stops, self._usable = bits_of(stop_ids, size), ~bits_of(banned, size) if banned else None
        self._bits = np.full((WIDEST_STEP + 1, size), ANYTHING, np.uint8)
        first, self._row_bytes = self._bits.ctypes.data, self._bits.strides[0]
        self._addresses = [first + row * self._row_bytes for row in range(len(self._bits))]
        self._matcher = compiled.deep_copy()
        self._committed: list[int] = []
        self._path: list[int] = []  # walked beyond the committed tokens
        self._dead: list[str] = []  # for each place looked at, why nothing can follow; "" if something can

    @counted
    def allowed(self, ahead: Sequence[int], width: int) -> Bits:
        """Return which tokens may come at the last positions of a round, [W, B], until the next question.

        The last position comes after all tokens `ahead`, each position before it after one fewer. Past a token that
        ends the output or breaks the grammar everything is allowed: no token is ever taken from there.
        """
        reached = self._walk(ahead)
        if reached == len(self._dead):
            self._look()
        if reached < len(ahead):
            self._bits[reached + 1 : len(ahead) + 1] = ANYTHING
        return self._bits[len(ahead) + 1 - width : len(ahead) + 1]

    @counted
    def follow(self, tokens: Sequence[int]) -> int:
        """Commit tokens up to the first that ends the output; return how many are kept: all, without an error."""
        for start in range(0, len(tokens), WIDEST_STEP):
            some = tokens[start : start + WIDEST_STEP]
            reached = self._walk(some)
            ended = reached < len(some)
            if ended and not self._may_follow(some[reached]):
                self.error = self._dead[reached] or f"token {some[reached]} breaks it"
                return start + reached
            self._committed += self._path
            self._path, self._dead = [], []
            if ended:
                break
        return len(tokens)

    def _walk(self, tokens: Sequence[int]) -> int:
        """Go past these tokens, or before the first that ends the output or breaks the grammar; return where."""
        shared = min(len(self._path), len(tokens))
        while self._path[:shared] != [*tokens[:shared]]:
            shared -= 1
        if shared < len(self._path):
            self._back_to(shared)
        for token in tokens[shared:]:
            if token in self._stop_ids or not self._may_follow(token):
                break
            self._matcher.consume_token(token)
            self._path.append(token)
        return len(self._path)

    def _back_to(self, place: int) -> None:
        if self._matcher.is_error():  # an error lasts, and the proposals that led to it were not accepted
            self._matcher = self._compiled.deep_copy()
            self._matcher.consume_tokens(self._committed + self._path[:place])
        else:
            self._matcher.rollback(len(self._path) - place)
        del self._path[place:], self._dead[place + 1 :]

    def _may_follow(self, token: int) -> bool:
        """Whether a token is allowed where the path ends."""
        place = len(self._path)
        if place == len(self._dead):
            self._look()
        if self._dead[place] or not 0 <= token < self._vocab_size:
            return False
        return bool(self._bits.item(place, token >> 3) >> (token & 7) & 1)

    def _look(self) -> None:
        """Ask the matcher what may follow where the path ends."""
        place, matcher = len(self._path), self._matcher
        assert place == len(self._dead)
        if self.seconds > MOST_SECONDS + SECONDS_A_TOKEN * len(self._committed):
            self._bits[place] = ANYTHING
            self._dead.append(TOO_SLOW)
            return
        matcher.unsafe_compute_mask_ptr(self._addresses[place], self._row_bytes)
        dead = ""
        if matcher.is_error():
            why = first_line(matcher.get_error())
            dead = f"nothing can follow: {NO_TOKEN if why == 'NoExtensionBias' else why}"
        else:
            if matcher.is_accepting():
                self._bits[place] |= self._stops
            if self._usable is not None and not (self._bits[place] & self._usable).any():
                dead = "logit_bias bans all that it allows there"
        if dead:
            self._bits[place] = ANYTHING
        self._dead.append(dead)


def bytes_for(vocab_size: int) -> int:
    """Return how many bytes hold a bit for each token; the library writes whole words of four."""
    return 4 * -(-vocab_size // 32)


def bits_of(tokens: Collection[int], size: int) -> Bits:
    """Return bytes in which the bits of these tokens are set."""
    flags = np.zeros(8 * size, np.uint8)
    flags[list(tokens)] = 1
    return np.packbits(flags, bitorder="little")
