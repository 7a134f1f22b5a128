"""Plans a round from the parameters of the live requests and what they want to draft."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count, repeat, zip_longest
from math import inf
from typing import NamedTuple

from ..acceptance.filters import FILTERS, TEMPERATURE
from ..acceptance.params import SamplingParams
from ..drafters import Drafter
from ..requests.request import Request
from ..state.asked import BESIDE, Wanted
from ..state.noise import MOST_CHILDREN
from ..state.plan import LEAST_WINDOW, Level, Plan
from ..state.rows import Rows
from ..state.shapes import TreeLength

AT_MOST = 2  # times as many branches as usual, on a level of a tree that adapts


class Share(NamedTuple):
    """One row's part in a round: how many tokens it proposes, from which source, and at which entropy it stops.

    Beside them it may have siblings, branches of a tree, or more lines of as many tokens from other sources.
    """

    length: int = 0
    source: Drafter | None = None
    entropy_limit: float | None = None
    siblings: int = 0
    beside: tuple[tuple[Drafter, int], ...] = ()
    tree: TreeLength | None = None

    @property
    def lines(self) -> tuple[tuple[Drafter, int], ...]:
        """The source of each line, and how many tokens it proposes."""
        return () if self.source is None else ((self.source, self.length), *self.beside)

    @property
    def longest(self) -> int:
        return max((length for _, length in self.lines), default=0)

    @property
    def drafter(self) -> str | None:
        if self.source is None:
            return None
        return BESIDE.join([self.source.name, *(source.name for source, _ in self.beside)])


class Planner:
    """Makes plans and keeps the last one while rows and shares stay the same.

    `most` proposals of a row can be verified at once; `bucket` tells how many entries of a row the steps should read if
    they need so many.
    """

    def __init__(
        self,
        rows: Rows,
        drafters: Mapping[str, Drafter],
        vocab_size: int,
        most: int,
        bucket: Callable[[int], int | None],
    ) -> None:
        self._rows, self._drafters, self._vocab_size, self._bucket = rows, drafters, vocab_size, bucket
        self._most = most
        self._wanted: list[Wanted] = []
        self.window = LEAST_WINDOW
        self._grown = False  # whether some live row had a tree in the last plan
        self.forget()

    def forget(self) -> None:
        """Drop the last plan, because the live rows have changed."""
        self.shares: tuple[Share, ...] | None = None  # of the last plan

    def plan(self, live: Sequence[Request], wanted: Sequence[Wanted], window: int = LEAST_WINDOW) -> Plan:
        """Plan the next round of these requests, in which drafts first read the last `window` tokens."""
        shares = self._within_reach(tuple(map(self._share, live, wanted, count(), repeat(window))))
        self._wanted = list(wanted)
        if (shares, window) != (self.shares, self.window):
            self.shares, self.window = shares, window
            self._plan = make_plan(
                [request.params for request in live],
                shares,
                vocab_size=self._vocab_size,
                traced=any(request.trace is not None for request in live),
                window=window,
            )
            each = [{source: (length, line) for line, (source, length) in enumerate(one.lines)} for one in shares]
            counts, lines = (
                [[lines.get(source, (0, 0))[i] for source in self._drafters.values()] for lines in each] for i in (0, 1)
            )
            self._rows.ask(
                counts,
                lines,
                [one.siblings for one in shares],
                [inf if one.entropy_limit in (None, 1) else one.entropy_limit for one in shares],
            )
            if self._plan.branches or self._grown:
                self._rows.grow(
                    [one.tree.levels if one.tree else () for one in shares],
                    [_adapts(one, request.params) for one, request in zip(shares, live, strict=True)],
                )
                self._grown = self._plan.branches > 0
            self.view = self._rows.view(self._plan.batch)
            runs = Counter(source for sources in self._plan.lines for source in sources)
            self.run_twice = {source for source, lines in runs.items() if lines > 1}
        entries = self._live_entries(live)
        if entries != self._plan.live:
            self._plan = replace(self._plan, live=entries)
        return self._plan

    def repeats(self, live: Sequence[Request], wanted: Sequence[Wanted]) -> bool:
        """Whether the last plan also fits the next round of the same rows, whatever this round decides."""
        if self.shares is None or any(source.reads_outputs for one in self.shares for source, _ in one.lines):
            return False
        if self._live_entries(live) != self._plan.live:
            return False
        several = [source for one in self.shares if one.beside for source, _ in one.lines]
        if self._plan.draft_length >= self.window and any(source.needs_model for source in several):
            return False  # a draft may lack more of what another line has committed than its first step reads
        if [(one.siblings, one.tree) for one in self._wanted] != [(one.siblings, one.tree) for one in wanted]:
            return False
        asked = [(one.length, one.drafter, one.entropy_limit) for one in self.shares]
        return asked == [(one.length, one.drafter if one.length else None, one.entropy_limit) for one in wanted]

    def _live_entries(self, live: Sequence[Request]) -> int | None:
        """Return how much of the caches is read by the next round, and by one launched before that is read."""
        width = self._plan.draft_length + self._plan.beyond + 1
        return self._bucket(max(request.length for request in live) + 2 * width)

    def _within_reach(self, shares: tuple[Share, ...]) -> tuple[Share, ...]:
        """Leave out what the target's widest step has no room for behind the longest line.

        Rows that lose something are never ones whose text depends on their siblings or on how many lines they have.
        """
        if not any(one.siblings or one.beside or one.tree for one in shares):
            return shares
        longest = max(one.longest for one in shares)
        room = self._most - longest
        lines = room // longest
        return tuple(
            one._replace(
                siblings=min(one.siblings, room),
                beside=one.beside[:lines],
                tree=one.tree if one.tree and one.tree.beyond <= room else None,
            )
            for one in shares
        )

    def _share(self, request: Request, wanted: Wanted, row: int, window: int) -> Share:
        """Plan one row, which proposes nothing while its draft is behind or its drafters have nothing to offer."""
        lines = []
        for source in filter(None, map(self._drafters.get, wanted.names)):
            model = source.model
            if model is not None and not 2 <= request.length <= model.cache.entries[row] + source.window(window):
                continue
            if length := source.ready(request, wanted.length):
                lines.append((source, length))
        if not lines:
            return Share(entropy_limit=wanted.entropy_limit)
        (source, length), *beside = lines
        tree = wanted.tree if wanted.tree and wanted.tree.length == length else None
        return Share(length, source, wanted.entropy_limit, wanted.siblings, tuple(beside), tree)


def _adapts(share: Share, params: SamplingParams) -> bool:
    """Whether a row's tree grows where scores say; a neighbour's may let it grow more, so no text may depend on it."""
    return share.tree is not None and not share.tree.children and not params.draft_decides


def _levels(shares: Sequence[Share], params: Sequence[SamplingParams], vocab_size: int) -> tuple[Level, ...]:
    """Return the most that trees have on each level, down to the last level where one has branches."""
    each = [
        _widths(one.tree, _adapts(one, own), vocab_size) for one, own in zip(shares, params, strict=True) if one.tree
    ]
    found = [Level(*map(max, zip(*level, strict=True))) for level in zip_longest(*each, fillvalue=Level(0, 1))]
    while found and not found[-1].branches:
        found.pop()
    return tuple(found)


def _widths(tree: TreeLength, adapts: bool, vocab_size: int) -> list[Level]:
    """Return the most that one tree may have on each level."""
    if not adapts:
        ranks = [[branch.rank + 1 for branch in level] for level in tree.levels]
        return [Level(len(each), min(max(each, default=1), vocab_size)) for each in ranks]
    found: list[Level] = []
    children = min(MOST_CHILDREN, vocab_size)
    for level in tree.levels:
        before = found[-1].branches if found else 0
        usual = max(children - 1, AT_MOST * len(level))
        found.append(Level(min(tree.beyond, usual, (1 + before) * children - 1), children))
    return found


def make_plan(
    params: Sequence[SamplingParams],
    shares: Sequence[Share],
    *,
    vocab_size: int,
    traced: bool = False,
    window: int = LEAST_WINDOW,
) -> Plan:
    """Plan a round for rows with these parameters and shares, whose draft models first read `window` tokens."""
    longest = max(one.longest for one in shares)
    each_line = zip_longest(*(one.lines for one in shares))  # the shares that have a line of this number, or None
    lines = [{source for source, _ in filter(None, line)} for line in each_line] or [set()]
    sources, *beside = (tuple(sorted(line, key=lambda source: source.place)) for line in lines)
    filters = [one for one in FILTERS if any(map(one.active, params))]
    own_draft = any(one.own_draft_temperature != one.temperature for one in params)
    limited = any(one.entropy_limit not in (None, 1) for one in shares)
    tests = {one.test for one in params}
    logprobs = [one.logprobs for one in params if one.logprobs is not None]
    return Plan(
        batch=len(params),
        draft_length=longest,
        siblings=max(one.siblings for one in shares),
        branches=max(one.tree.beyond if one.tree else 0 for one in shares),
        levels=_levels(shares, params, vocab_size),
        sources=sources,
        beside=tuple(beside),
        window=window,
        filters=tuple(filters),
        draft_filters=tuple(one for one in FILTERS if one in filters or one is TEMPERATURE) if own_draft else (),
        own_draft=own_draft,
        ragged=limited
        or any(one.length < longest or any(source.may_come_short for source, _ in one.lines) for one in shares),
        rejection="rejection" in tests,
        tokenwise="tokenwise" in tests,
        coupled="coupled" in tests,
        gumbel=any(not one.greedy and one.rule == "coupled" for one in params),
        lenient=any(one.lenient for one in params),
        logprobs=min(max(logprobs), vocab_size) if logprobs else None,
        traced=traced,
        entropies=any(one.length and one.entropy_limit is not None for one in shares),
    )
