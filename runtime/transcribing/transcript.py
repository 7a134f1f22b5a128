"""Cut the tokens of a window into pieces of text with their times."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ..requests.metrics import Speculation


@dataclass(frozen=True)
class Segment:
    """A piece of text, and when it was said, in seconds from the beginning."""

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Transcript:
    text: str
    language: str | None  # None: the model knows one alone
    seconds: float  # of sound
    segments: tuple[Segment, ...]
    speculation: Speculation


@dataclass(frozen=True)
class Cut:
    """A window's tokens between two times, which are counted in times from the window's beginning."""

    start: float
    end: float
    tokens: tuple[int, ...]


def cuts(tokens: Sequence[int], first_time: int, length: float) -> tuple[list[Cut], float | None]:
    """Cut the tokens of a window of such a length; return where the next begins, None for after this one.

    A text that two times end goes on there. One that ends with a single time is followed by silence, and what has no
    pairs of times is one piece.
    """
    is_time = [token >= first_time for token in tokens]
    pairs = [place for place in range(1, len(tokens)) if is_time[place - 1] and is_time[place]]
    if not pairs:
        last = max((token for token in tokens if token > first_time), default=None)
        return [Cut(0, length if last is None else last - first_time, tuple(tokens))], None
    ends_alone = is_time[-2:] == [False, True]
    found = list(_between(tokens, [0, *pairs, *([len(tokens)] if ends_alone else [])], first_time))
    return found, None if ends_alone else found[-1].end


def _between(tokens: Sequence[int], places: Sequence[int], first_time: int) -> Iterator[Cut]:
    for begin, end in pairwise(places):
        yield Cut(tokens[begin] - first_time, tokens[end - 1] - first_time, tuple(tokens[begin:end]))
