"""What a request drafts: what it asks for, parsed once, and its share of the next round."""

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import NamedTuple, NoReturn, Self

from ...engines import MAX_DRAFT_LENGTH, Bundle, RequestError
from .needs import FURTHER, HEADS
from .shapes import Shape, line

NONE = "none"  # the drafter that proposes nothing
BESIDE = "+"  # between the names of drafters that give a line each
AUTO = "auto"  # the controller chooses the draft length, anew for each round
DEFAULT_DRAFT_LENGTH = 4  # where nothing has been measured
MIXED = "mixed"  # the controller also chooses the drafter, of those that are `in_mixed`
DRAFTER_NAMES = (
    *("model", "common", "text", "lookup", "suffix", "ngram", "random", "cascade"),
    *HEADS,
    *("pard", "pass"),
    *FURTHER,
)


def usual_drafter(bundle: Bundle, open_here: Collection[str] = DRAFTER_NAMES) -> str:
    """Return the drafter of requests that name none; not every engine runs look-aheads."""
    if bundle.drafts:
        return "model" if bundle.models[bundle.drafts[0]].masks is None else "pard"
    if bundle.foreign is not None and not bundle.heads:
        tokens = bundle.models[bundle.foreign].tokens
        assert tokens is not None
        return tokens.drafter
    looks_ahead = bundle.target.look_aheads and "pass" in open_here
    return next(iter(bundle.heads), "pass" if looks_ahead else "lookup")


@dataclass(frozen=True)
class EntropyRule:
    """A draft length that falls from `longest`, where the draft is certain, to `shortest`."""

    shortest: int = 1
    longest: int = 8
    smoothing: float = 0.5  # weight that the earlier entropy keeps after one more round
    stop_above: float = 1.0  # a round stops proposing once the draft's entropy exceeds this

    def __post_init__(self) -> None:
        for name in ("shortest", "longest"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 0:
                raise RequestError(f"{name} is {getattr(self, name)!r}, expected a whole number >= 0")
        if self.longest > MAX_DRAFT_LENGTH:
            raise RequestError(f"longest is {self.longest}, expected at most {MAX_DRAFT_LENGTH}")
        if not self.shortest <= self.longest:
            raise RequestError(f"shortest is {self.shortest}, expected at most longest, which is {self.longest}")
        for name in ("smoothing", "stop_above"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 <= value <= 1:
                raise RequestError(f"{name} is {value!r}, expected a number from 0 to 1")


ENTROPY_HELP = {
    "shortest": "fewest proposals in a round, used when the draft's entropy is 1",
    "longest": "most proposals in a round, used when the draft's entropy is 0",
    "smoothing": "weight of earlier rounds in the entropy that counts, 0 to 1",
    "stop_above": "stop proposing in a round once the draft's entropy exceeds this, 0 to 1",
}
assert list(ENTROPY_HELP) == [field.name for field in fields(EntropyRule)]


DraftLength = int | str | Shape | EntropyRule  # a number, a shape like 5+3, "auto", or a rule of its own


def refuse_length_of_mixed(length: object) -> NoReturn:
    raise RequestError(f"drafter mixed needs draft_length auto, not {length!r}; name one drafter")


@dataclass(frozen=True)
class Drafting:
    """A draft length and drafters that the decoder's rules have checked."""

    length: Shape | EntropyRule | None  # None: auto
    drafter: str
    beyond: int = 0  # the most branches beside its line
    look_aheads: int = 0  # the most that the target reads beside them

    @property
    def draft_length(self) -> DraftLength:
        """The length as it is asked for: a plain line is a number."""
        length = AUTO if self.length is None else self.length
        return length.length if isinstance(length, Shape) and length.is_number else length

    @property
    def longest(self) -> int:
        """The most proposals in one of its lines."""
        if self.length is None:
            return MAX_DRAFT_LENGTH
        return self.length.longest if isinstance(self.length, EntropyRule) else self.length.length

    def widest(self, longest: int = MAX_DRAFT_LENGTH) -> int:
        """The most tokens that its rounds verify, beside neighbours whose lines have up to the `longest`."""
        return longest * (1 + self.drafter.count(BESIDE)) + 1 + self.beyond + self.look_aheads


class Share(NamedTuple):
    """What one request proposes in a round. Its chooser wants it, and the planner leaves out what cannot be had."""

    lines: tuple[tuple[str, int], ...] = ()  # the drafter of each, and how many tokens it proposes
    shape: Shape = line(0)  # of the first; the others are lines
    entropy_limit: float | None = None  # at which the first ends

    @classmethod
    def of(cls, shape: Shape, drafter: str, entropy_limit: float | None = None) -> Self:
        """Return a shape of the first of these drafters, and of each other one a line as long."""
        if not shape.length or drafter == NONE:
            return cls(entropy_limit=entropy_limit)
        return cls(tuple((name, shape.length) for name in drafter.split(BESIDE)), shape, entropy_limit)

    @property
    def length(self) -> int:
        return self.shape.length

    @property
    def longest(self) -> int:
        return max((length for _, length in self.lines), default=0)

    @property
    def names(self) -> tuple[str, ...]:
        """The drafter of each line."""
        return tuple(name for name, _ in self.lines)

    @property
    def drafter(self) -> str:
        return BESIDE.join(name for name, _ in self.lines)

    @property
    def more(self) -> bool:
        """Whether it has more than one line."""
        return len(self.lines) > 1 or self.shape.beyond > 0


NOTHING = Share()
