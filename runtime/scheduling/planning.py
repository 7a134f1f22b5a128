"""Plans a round from the parameters of the live requests and what they want to draft."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count, repeat, zip_longest

from ..acceptance.filters import FILTERS, TEMPERATURE
from ..acceptance.sampling_params import SamplingParams
from ..drafters import Drafter
from ..memory.adapter_pool import AdapterPool
from ..memory.model import Model
from ..requests.request import Request
from ..state.asked import Share
from ..state.plan import LEAST_WINDOW, Level, Plan
from ..state.rows import Rows
from ..state.shapes import MOST_CHILDREN, Shape, line

AT_MOST = 2  # times as many branches as usual, on a level of a tree that adapts


class Planner:
    """Makes plans and keeps the last one while rows and shares stay the same.

    `most` proposals of a row can be verified at once; `bucket` says how many entries of a row the steps should read if
    they need so many, None if they know by themselves; models that are `recurrent` absorb what they have read.
    """

    def __init__(
        self,
        rows: Rows,
        drafters: Mapping[str, Drafter],
        vocab_size: int,
        most: int,
        bucket: Callable[[int], int | None] | None,
        recurrent: Sequence[Model] = (),
        adapters: AdapterPool | None = None,
    ) -> None:
        self._rows, self.drafters, self._vocab_size, self._bucket = rows, drafters, vocab_size, bucket
        self._places = {name: source.place for name, source in drafters.items()}
        self._recurrent, self._adapters = recurrent, adapters
        self._most = most
        self._wanted: list[Share] = []
        self.window = LEAST_WINDOW
        self._grown = False  # whether some live row had branches in the last plan
        self.forget()

    def forget(self) -> None:
        """Drop the last plan, because the live rows have changed."""
        self.shares: tuple[Share, ...] | None = None  # of the last plan

    def plan(self, live: Sequence[Request], wanted: Sequence[Share], window: int = LEAST_WINDOW) -> Plan:
        """Plan the next round of these requests, in which drafts first read the last `window` tokens."""
        shares = self._within_reach(tuple(map(self._share, live, wanted, count(), repeat(window))))
        self._wanted = list(wanted)
        if (shares, window) != (self.shares, self.window):
            self.shares, self.window = shares, window
            self._plan = make_plan(
                [request.params for request in live],
                shares,
                self.drafters,
                vocab_size=self._vocab_size,
                traced=any(request.trace is not None for request in live),
                window=window,
                adapters=0 if self._adapters is None else self._adapters.columns(0, len(live)),
            )
            self._rows.ask(shares, self._places)
            if self._plan.branches or self._grown:
                adapt = [_adapts(one.shape, request.params) for one, request in zip(shares, live, strict=True)]
                self._rows.grow(shares, adapt)
                self._grown = self._plan.branches > 0
            self.view = self._rows.view(self._plan.batch)
            runs = Counter(drafter for drafters in self._plan.lines for drafter in drafters)
            self.run_twice = {drafter for drafter, lines in runs.items() if lines > 1}
        for draft in self._plan.drafts:
            if draft.recurrent:  # also in rows that do not ask it, where it writes as well
                draft.take_part([_reaches(request, draft, row, LEAST_WINDOW) for row, request in enumerate(live)])
        entries, since = self._entries_read(live), self._since(len(live))
        if (entries, since) != (self._plan.entries_read, self._plan.since):
            self._plan = replace(self._plan, entries_read=entries, since=since)
        return self._plan

    def repeats(self, live: Sequence[Request], wanted: Sequence[Share]) -> bool:
        """Whether the last plan also fits the next round of the same rows, whatever this round decides."""
        if self.shares is None:
            return False
        if any(self.drafters[name].reads_outputs for one in self.shares for name in one.names):
            return False
        if self._entries_read(live) != self._plan.entries_read:
            return False
        run = [{self.drafters[name].model for name in one.names} for one in self.shares]
        if any(draft.recurrent and draft not in own for draft in self._plan.drafts for own in run):
            return False  # it may lack tokens of rows that do not ask it
        several = [name for one in self.shares if len(one.lines) > 1 for name in one.names]
        if self._plan.draft_length >= self.window and any(self.drafters[name].needs_model for name in several):
            return False  # a draft may lack more of what another line has committed than its first step reads
        if self._wanted != wanted:
            return False
        return [(one.length, one.names) for one in wanted] == [(one.length, one.names) for one in self.shares]

    def _entries_read(self, live: Sequence[Request]) -> int | None:
        """Return how much of the caches is read by the next round, and by one launched before that is read."""
        if self._bucket is None:
            return None
        width = self._plan.draft_length + self._plan.beyond + 1 + self._plan.look_aheads
        drafted = max((draft.reads_for(self._plan.draft_length) + 1 for draft in self._plan.drafts), default=0)
        return self._bucket(max(request.length for request in live) + width + max(width, drafted))

    def _since(self, live: int) -> int:
        """Return the most tokens that recurrent layers may have to absorb in the next round, or one launched then."""
        if not self._recurrent:
            return 1
        found = (model.cache.since(row) for model in self._recurrent for row in range(live))
        return max(1 + self._plan.draft_length, *found)

    def _within_reach(self, shares: tuple[Share, ...]) -> tuple[Share, ...]:
        """Leave out what the target's widest step has no room for after the longest line.

        Rows that lose something are never ones whose text depends on their siblings or on how many lines they have.
        """
        if not any(one.more for one in shares):
            return shares
        longest = max(one.longest for one in shares)
        room = self._most - longest
        return tuple(
            one._replace(lines=one.lines[: 1 + room // longest], shape=one.shape.within(room)) for one in shares
        )

    def _share(self, request: Request, wanted: Share, row: int, window: int) -> Share:
        """Plan one row, which proposes nothing while its draft lacks tokens or its drafters have nothing to offer."""
        lines = []
        for number, (name, most) in enumerate(wanted.lines):
            drafter = self.drafters.get(name)
            if drafter is None:
                continue
            model = drafter.model
            if model is not None and not _reaches(request, model, row, drafter.window(window)):
                continue
            if length := drafter.ready(request, most, wanted.names[:number].count(name)):
                lines.append((name, length))
        length = lines[0][1] if lines else 0
        shape = wanted.shape if wanted.length == length else line(length)
        return Share(tuple(lines), shape, wanted.entropy_limit)


def _reaches(request: Request, draft: Model, row: int, window: int) -> bool:
    """Whether a draft has read all of a row but what a round's first step reads, two tokens at least."""
    begin = request.begin(window)
    return begin + LEAST_WINDOW <= request.length and begin <= draft.cache.entries[row]


def _adapts(shape: Shape, params: SamplingParams) -> bool:
    """Whether branches go where scores say.

    Where others may follow them, a neighbour's tree may let them grow more, so no text may depend on it.
    """
    return not shape.fixed and params.test == "coupled" and (shape.leaves or not params.draft_decides)


def _levels(
    shares: Sequence[Share], params: Sequence[SamplingParams], vocab_size: int
) -> tuple[tuple[Level, ...], Level]:
    """Return the most that rows have on each level, down to the last that has branches, and the most leaves."""
    each = [
        (one.shape.leaves, _widths(one.shape, _adapts(one.shape, own), vocab_size))
        for one, own in zip(shares, params, strict=True)
        if one.shape.beyond
    ]
    trees = zip_longest(*(widths for leaves, widths in each if not leaves), fillvalue=Level())
    found = [Level(*map(max, zip(*level, strict=True))) for level in trees]
    while found and not found[-1].branches:
        found.pop()
    leaves = [level for leaves, widths in each if leaves for level in widths]
    return tuple(found), Level(*map(max, zip(Level(), *leaves, strict=True)))


def _widths(shape: Shape, adapts: bool, vocab_size: int) -> list[Level]:
    """Return the most that one row may have on each level, or leaves."""
    if not adapts:
        ranks = [[branch.rank + 1 for branch in level] for level in shape.levels]
        return [Level(len(each), min(max(each, default=1), vocab_size)) for each in ranks]
    found: list[Level] = []
    children = min(MOST_CHILDREN, vocab_size)
    if shape.leaves:
        return [Level(min(shape.beyond, shape.length * (children - 1)), children)]
    for level in shape.levels:
        before = found[-1].branches if found else 0
        usual = max(children - 1, AT_MOST * len(level))
        found.append(Level(min(shape.beyond, usual, (1 + before) * children - 1), children))
    return found


def make_plan(
    params: Sequence[SamplingParams],
    shares: Sequence[Share],
    drafters: Mapping[str, Drafter],
    *,
    vocab_size: int,
    traced: bool = False,
    window: int = LEAST_WINDOW,
    adapters: int = 0,
) -> Plan:
    """Plan a round for rows with these parameters and shares, whose draft models first read `window` tokens."""
    longest = max(one.longest for one in shares)
    each_line = zip_longest(*(one.lines for one in shares))  # the shares that have a line of this number, or None
    lines = [{drafters[name] for name, _ in filter(None, own)} for own in each_line] or [set()]
    levels, leaves = _levels(shares, params, vocab_size)
    filters = [one for one in FILTERS if any(map(one.active, params))]
    own_draft = any(one.own_draft_temperature != one.temperature for one in params)
    limited = any(one.entropy_limit not in (None, 1) for one in shares)
    tests = {one.test for one in params}
    logprobs = [one.logprobs for one in params if one.logprobs is not None]
    return Plan(
        batch=len(params),
        draft_length=longest,
        lines=tuple(tuple(sorted(own, key=lambda drafter: drafter.place)) for own in lines),
        branches=max(one.shape.beyond for one in shares),
        levels=levels,
        leaves=leaves,
        look_aheads=max(
            (drafters[name].look_aheads(length) for one in shares for name, length in one.lines), default=0
        ),
        window=window,
        adapters=adapters,
        filters=tuple(filters),
        draft_filters=tuple(one for one in FILTERS if one in filters or one is TEMPERATURE) if own_draft else (),
        own_draft=own_draft,
        ragged=limited
        or any(one.length < longest or any(drafters[name].may_come_short for name in one.names) for one in shares),
        rejection="rejection" in tests,
        tokenwise="tokenwise" in tests,
        coupled="coupled" in tests,
        gumbel=any(not one.greedy and one.rule == "coupled" for one in params),
        lenient=any(one.lenient for one in params),
        logprobs=min(max(logprobs), vocab_size) if logprobs else None,
        traced=traced,
        entropies=any(one.length and one.entropy_limit is not None for one in shares),
    )
