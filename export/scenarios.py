"""The calls by which a graph is checked, and the token sequences whose logits they must reproduce.

Token ids are random: a graph that computes another function than its checkpoint cannot be lucky on them.
"""

from dataclasses import dataclass, field
from random import Random

from ..engines.contract import WIDEST_STEP

ROWS = 4  # cache rows: one for the calls of a single request, three for the ragged batch


@dataclass(frozen=True)
class RowCall:
    """What one call does to one cache row: write `tokens` at `start`, of which all but `padding` are real."""

    tokens: list[int]
    start: int
    padding: int
    branch: int  # the sequence these tokens belong to, as an index of `Script.branches`

    @property
    def live(self) -> int:
        return len(self.tokens) - self.padding


@dataclass(frozen=True)
class Call:
    scenario: str
    first_row: int
    rows: list[RowCall]


@dataclass
class Script:
    """Calls in order; a call that goes back and differs opens a new branch of its row's sequence."""

    vocab: int
    max_length: int
    random: Random = field(default_factory=lambda: Random(0))
    calls: list[Call] = field(default_factory=list)
    branches: list[list[int]] = field(default_factory=lambda: [[] for _ in range(ROWS)])
    current: list[int] = field(default_factory=lambda: list(range(ROWS)))  # branch of each cache row

    @property
    def capacity(self) -> int:
        """Room for the longest sequence, and for a padded call at its end."""
        return max(map(len, self.branches)) + max(len(call.rows[0].tokens) for call in self.calls)

    def length(self, row: int) -> int:
        return len(self.branches[self.current[row]])

    def call(self, scenario: str, first_row: int, width: int, live: list[int], back: list[int] | None = None) -> None:
        """Write `width` rows, the first `live` of them real, after going `back` some rows, for adjacent cache rows."""
        rows = []
        for offset, (real, rejected) in enumerate(zip(live, back or [0] * len(live), strict=True)):
            row = first_row + offset
            start = self.length(row) - rejected
            real = min(real, self.max_length - start)
            assert start >= 0, "a script cannot go back before the first row"
            if real < 1:
                return
            if rejected:
                self.branches.append(self.branches[self.current[row]][:start])
                self.current[row] = len(self.branches) - 1
            tokens = [self.random.randrange(self.vocab) for _ in range(width)]
            self.branches[self.current[row]] += tokens[:real]
            rows.append(RowCall(tokens, start, width - real, self.current[row]))
        self.calls.append(Call(scenario, first_row, rows))


def write_script(vocab: int, max_length: int) -> Script:
    """Write down all that a runtime does to a cache; calls beyond a short maximum length are left out."""
    script = Script(vocab, max_length)
    chunk = min(16, max_length // 5)
    script.call("chunked prefill", 0, chunk, [chunk])
    script.call("chunked prefill", 0, chunk, [chunk // 2 + 1])
    for _ in range(3):
        script.call("single steps", 0, 1, [1])
    script.call("verify width", 0, 5, [5])
    script.call("rollback", 0, 5, [5], back=[4])
    script.call("rollback", 0, 2, [2], back=[1])
    script.call("rollback", 0, 1, [1], back=[3])
    script.call("verify width", 0, WIDEST_STEP, [WIDEST_STEP])
    script.call("ragged batch", 1, chunk, [chunk, chunk // 2, 1])
    script.call("ragged batch", 1, 5, [5, 3, 1])
    script.call("ragged batch", 1, 1, [1, 1, 1])
    script.call("ragged batch", 1, 5, [2, 5, 4], back=[3, 0, 1])
    return script
