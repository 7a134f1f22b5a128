"""The calls by which a graph is checked, and the token sequences whose logits they must reproduce.

Token ids are random: a graph that computes another function than its checkpoint cannot be lucky on them.
"""

from dataclasses import dataclass, field
from random import Random

from ...engines.contract import MAX_DRAFT_LENGTH

TREE = "tree"  # a scenario that an engine of lines leaves out, as it does the next
TAIL = "tail"  # of graphs that take one
LOOK_AHEAD = "look-aheads"  # of a target that has some
ROWS = 4  # cache rows: one for the calls of a single request, three for the ragged batch


@dataclass(frozen=True)
class RowCall:
    """One call's work on one cache row: it writes `tokens` at `start`, of which all but `padding` are real."""

    tokens: list[int]
    start: int
    padding: int
    parents: list[int]  # the token before each in its sequence, by index; -1: the last in the cache
    branches: list[int]  # the sequence each real token belongs to, as an index of `Script.branches`
    accepted: list[int] | None = None  # tokens of a path whose entries then move into order, if it is to go on
    tail: int = 0  # so many entries before `start` branch as well; all that has an index counts them first
    read: int = 0  # recurrent layers absorb so many of the tokens in this call

    @property
    def real(self) -> int:
        return len(self.tokens) - self.padding

    @property
    def paths(self) -> list[list[int]]:
        """The tokens on the way to each, itself included."""
        return paths_of(self.parents)

    @property
    def positions(self) -> list[int]:
        """The positions of the tail and of the tokens, from `start` on."""
        return [len(path) - 1 - self.tail for path in self.paths]

    @property
    def depths(self) -> list[int]:
        return self.positions[self.tail :]

    @property
    def ancestors(self) -> list[list[bool]]:
        return [[token in path for token in range(len(self.parents))] for path in self.paths[self.tail :]]


@dataclass(frozen=True)
class Call:
    scenario: str
    first_row: int
    rows: list[RowCall]
    goes_on: bool = False  # after the call before, whose tokens recurrent layers have not absorbed


def paths_of(parents: list[int]) -> list[list[int]]:
    """Return the way to each node of a tree, itself included; parents come first."""
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


def leaves_of(parents: list[int]) -> list[list[int]]:
    """Return the ways to the nodes without children."""
    return [path for path in paths_of(parents) if path[-1] not in parents]


def line_of(width: int) -> list[int]:
    return list(range(-1, width - 1))


def random_tree(random: Random, nodes: int, deepest: int) -> tuple[list[int], list[int]]:
    """Return the parents of the nodes, and a path of three nodes or more to a leaf with others between."""
    while True:
        parents = [-1]
        while len(parents) < nodes:
            parents.append(random.choice([path[-1] for path in paths_of(parents) if len(path) <= deepest]))
        if paths := [path for path in leaves_of(parents) if len(path) > 2 and path[-1] >= len(path)]:
            return parents, random.choice(paths)


@dataclass
class Script:
    """Calls in order; a call that goes back and differs opens a new branch of its row's sequence."""

    vocab: int
    max_length: int
    random: Random = field(default_factory=lambda: Random(0))
    calls: list[Call] = field(default_factory=list)
    branches: list[list[int]] = field(default_factory=lambda: [[] for _ in range(ROWS)])
    current: list[int] = field(default_factory=lambda: list(range(ROWS)))  # branch of each cache row
    rows: list[int] = field(default_factory=lambda: list(range(ROWS)))  # cache row of each branch
    recurrent: bool = False
    absorbed: list[int] = field(default_factory=lambda: [0] * ROWS)  # tokens of each cache row, by recurrent layers

    @property
    def capacity(self) -> int:
        """Room for the longest sequence, and for a padded call at its end."""
        return max(map(len, self.branches)) + max(len(call.rows[0].tokens) for call in self.calls)

    def length(self, row: int) -> int:
        return len(self.branches[self.current[row]])

    def call(
        self,
        scenario: str,
        first_row: int,
        width: int,
        counts: list[int],
        back: list[int] | None = None,
        *,
        read: bool = False,
        goes_on: bool = False,
    ) -> None:
        """Write `width` rows for adjacent cache rows, the first `counts` of them real, after going `back` some rows.

        Recurrent layers absorb what comes before, unless the call `goes_on`, and its own tokens if they are `read`.
        No call goes back before what they have absorbed.
        """
        rows = []
        for offset, (real, rejected) in enumerate(zip(counts, back or [0] * len(counts), strict=True)):
            row = first_row + offset
            start = self.length(row) - rejected
            if self.recurrent and start < self.absorbed[row]:
                start = self.absorbed[row]
                rejected = self.length(row) - start
            real = min(real, self.max_length - start)
            assert start >= 0, "a script cannot go back before the first row"
            if real < 1:
                return
            if rejected:
                self.branches.append(self.branches[self.current[row]][:start])
                self.rows.append(row)
                self.current[row] = len(self.branches) - 1
            tokens = [self.random.randrange(self.vocab) for _ in range(width)]
            self.branches[self.current[row]] += tokens[:real]
            branches, absorbed = [self.current[row]] * real, real if read else 0
            rows.append(RowCall(tokens, start, width - real, line_of(width), branches, read=absorbed))
            if not goes_on:
                self.absorbed[row] = start + absorbed
        self.calls.append(Call(scenario, first_row, rows, goes_on))

    def tree(self, scenario: str, first_row: int, width: int, counts: list[int]) -> None:
        """Write a tree of this many tokens after each of adjacent cache rows, and go on after one path of each."""
        if any(self.length(row) + real > self.max_length for row, real in enumerate(counts, first_row)):
            return
        rows = []
        for row, real in enumerate(counts, first_row):
            start, before = self.length(row), self.branches[self.current[row]]
            parents, accepted = random_tree(self.random, real, deepest=real)
            tokens = [self.random.randrange(self.vocab) for _ in range(width)]
            branches = self._branch(row, before, parents, tokens)
            self.current[row] = branches[accepted[-1]]
            padded = parents + list(range(real - 1, width - 1))
            rows.append(RowCall(tokens, start, width - real, padded, branches, accepted))
            self.absorbed[row] = start
        self.calls.append(Call(scenario, first_row, rows))

    def tails(self, first_row: int, widths: list[int]) -> None:
        """Write trees one after another for two adjacent rows, each after all that comes before; go on at a leaf."""
        rows, nodes = (first_row, first_row + 1), sum(widths)
        if any(self.length(row) + nodes > self.max_length for row in rows):
            return
        calls: list[list[RowCall]] = [[] for _ in widths]
        for row in rows:
            before, parents = self.branches[self.current[row]], list[int]()
            for width in widths:
                tail = len(parents)
                parents += [self.random.randrange(-1, tail + node) for node in range(width)]
            said = [self.random.randrange(self.vocab) for _ in range(nodes)]
            branches = self._branch(row, before, parents, said)
            last = range(nodes - widths[-1], nodes)
            accepted = max((path for path in leaves_of(parents) if path[-1] in last), key=len)
            self.current[row] = branches[accepted[-1]]
            tail = 0
            for call, width in zip(calls, widths, strict=True):
                end = tail + width
                path = accepted if end == nodes else None
                start = len(before) + tail
                call.append(RowCall(said[tail:end], start, 0, parents[:end], branches[tail:end], path, tail=tail))
                tail = end
        self.calls += [Call(TAIL, first_row, call) for call in calls]

    def _branch(self, row: int, before: list[int], parents: list[int], tokens: list[int]) -> list[int]:
        """Open a branch after `before` for each leaf of a tree; return one that each node belongs to."""
        branches = [0] * len(parents)
        for path in leaves_of(parents):
            for node in path:
                branches[node] = len(self.branches)
            self.branches.append(before + [tokens[node] for node in path])
            self.rows.append(row)
        return branches

    def look_ahead(self, ids: list[int]) -> None:
        """Write lines with look-aheads after their first tokens for two adjacent rows, and go on within each line."""
        if not ids or any(self.length(row) + 4 + len(ids) > self.max_length for row in (1, 2)):
            return
        rows, parents = [], [*line_of(4), 0, *range(4, 3 + len(ids))]
        for row in (1, 2):
            before, said = self.branches[self.current[row]], [self.random.randrange(self.vocab) for _ in range(4)]
            line, ahead = len(self.branches), len(self.branches) + 1
            self.branches += [before + said, before + said[:1] + ids]
            self.rows += [row, row]
            self.current[row] = line
            rows.append(RowCall(said + ids, len(before), 0, parents, [line] * 4 + [ahead] * len(ids)))
        self.calls.append(Call(LOOK_AHEAD, 1, rows))
        self.call(LOOK_AHEAD, 1, 3, [3, 3], back=[2, 1])


def write_script(vocab: int, max_length: int, recurrent: bool = False, tails: bool = False) -> Script:
    """Write down all that a runtime does to a cache; calls beyond a short maximum length are left out."""
    script = Script(vocab, max_length, recurrent=recurrent)
    chunk = min(16, max_length // 5)
    script.call("chunked prefill", 0, chunk, [chunk], read=True)
    script.call("chunked prefill", 0, chunk, [chunk // 2 + 1], read=True)
    for _ in range(3):
        script.call("single steps", 0, 1, [1])
    script.call("verify width", 0, 5, [5])
    script.call("rollback", 0, 5, [5], back=[4])
    script.call("rollback", 0, 2, [2], back=[1])
    script.call("rollback", 0, 1, [1], back=[3])
    script.call("verify width", 0, MAX_DRAFT_LENGTH + 1, [MAX_DRAFT_LENGTH + 1])
    if recurrent:
        script.call("draft's steps", 0, 2, [2], back=[1])
        for _ in range(3):
            script.call("draft's steps", 0, 1, [1], goes_on=True)
        script.call("draft's steps", 0, 2, [2], back=[2])
        script.call("draft's steps", 0, 1, [1], goes_on=True)
        script.call("read after a draft's steps", 0, 4, [4], back=[1], read=True)
        script.call("read after a draft's steps", 0, 3, [3])
    script.call("ragged batch", 1, chunk, [chunk, chunk // 2, 1], read=True)
    script.call("ragged batch", 1, 5, [5, 3, 1])
    script.call("ragged batch", 1, 1, [1, 1, 1])
    script.call("ragged batch", 1, 5, [2, 5, 4], back=[3, 0, 1])
    script.tree(TREE, 1, 7, [7, 5, 6])
    script.call(TREE, 1, 3, [3, 3, 3])
    if tails:
        script.tails(2, [4, 5, 3])
        script.call(TAIL, 2, 3, [3, 3])
    return script
