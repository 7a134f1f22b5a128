"""The tokens of a text that grows: only its end is tokenised again.

What follows may still change the last tokens of a text, but none far before them. So a text is cut where its tokens are
those of both parts, and what lies before the cut is settled.
"""

from collections.abc import Iterator
from itertools import islice

from tokenizers import Tokenizer

KEPT, LONGEST = 48, 160  # characters at the end that stay open when a text is cut, and at which it is cut
TRIED = 3  # places for a cut
ANCHOR = "x"  # comes before the end of a text: tokenizers treat the beginning of one in another way


class GrowingTokens:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = _encode(tokenizer, ANCHOR)
        self._settled: list[int] = []
        self._end = ""  # what follows these
        self._inside = False  # whether text lies before it
        self._open: list[int] | None = []  # its tokens; None: they have to be made
        self._try_at = LONGEST

    def append(self, text: str) -> None:
        if text:
            self._end += text
            self._open = None

    def put(self, token: int) -> None:
        """Append a token that is no text."""
        self._settled = [*self.ids, token]
        self._end, self._inside, self._open, self._try_at = "", False, [], LONGEST

    @property
    def ids(self) -> list[int]:
        return self._settled + self._of_end()

    def following(self, text: str) -> list[int]:
        """Return the tokens of what may be appended, after those that are there."""
        before, both = self._of_end(), self._tokens(self._end + text, self._inside)
        if both[: len(before)] == before:
            return both[len(before) :]
        return self._tokens(text, inside=True)  # the last tokens are not those of the longer text

    def _of_end(self) -> list[int]:
        if self._open is None:
            self._open = self._tokens(self._end, self._inside)
            if len(self._end) >= self._try_at:
                self._cut()
        return self._open

    def _cut(self) -> None:
        end, tokens = self._end, self._open
        for place in islice(_places(end), TRIED):
            left, right = self._tokens(end[:place], self._inside), self._tokens(end[place:], inside=True)
            if left + right == tokens:
                self._settled += left
                self._end, self._inside, self._open = end[place:], True, right
                break
        self._try_at = len(self._end) + LONGEST - KEPT

    def _tokens(self, text: str, inside: bool) -> list[int]:
        if not inside or not text:
            return _encode(self._tokenizer, text)
        anchored = _encode(self._tokenizer, ANCHOR + text)
        begin = len(self._anchor)
        return anchored[begin:] if anchored[:begin] == self._anchor else _encode(self._tokenizer, text)


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def _places(text: str) -> Iterator[int]:
    """Yield where a text may be cut: before the spaces that words begin with, and where there are none anywhere."""
    last = len(text) - KEPT
    for place in range(last, last - KEPT, -1):
        if text[place].isspace() and not text[place - 1].isspace():
            yield place
    yield last
