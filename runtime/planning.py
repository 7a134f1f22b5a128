"""Plans a round from the parameters of the live requests and what they want to draft."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from .drafters import Drafter
from .lengths.chooser import Wanted
from .requests.request import Request
from .round.plan import Plan
from .round.rows import Rows
from .sampling.filters import FILTERS, TEMPERATURE
from .sampling.params import SamplingParams


class Share(NamedTuple):
    """One row's part in a round: how many tokens it proposes, from which source, and at which entropy it stops.

    Beside them it may have siblings.
    """

    length: int = 0
    source: Drafter | None = None
    entropy_limit: float | None = None
    siblings: int = 0

    @property
    def drafter(self) -> str | None:
        return None if self.source is None else self.source.name


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
        self.forget()

    def forget(self) -> None:
        """Drop the last plan, because the live rows have changed."""
        self.shares: tuple[Share, ...] | None = None  # of the last plan

    def plan(self, live: Sequence[Request], wanted: Sequence[Wanted], draft_entries: Sequence[int]) -> Plan:
        """Plan the next round of these requests; `draft_entries` counts the valid entries of the draft's cache."""
        shares = self._within_reach(tuple(map(self._share, live, wanted, draft_entries)))
        self._wanted = list(wanted)
        if shares != self.shares:
            self.shares = shares
            self._plan = make_plan(
                [request.params for request in live],
                shares,
                vocab_size=self._vocab_size,
                traced=any(request.trace is not None for request in live),
            )
            self._rows.ask(
                [[one.length if one.source is source else 0 for source in self._drafters.values()] for one in shares],
                [one.siblings for one in shares],
                [inf if one.entropy_limit in (None, 1) else one.entropy_limit for one in shares],
            )
            self.view = self._rows.view(self._plan.batch)
        entries = self._live_entries(live)
        if entries != self._plan.live:
            self._plan = replace(self._plan, live=entries)
        return self._plan

    def repeats(self, live: Sequence[Request], wanted: Sequence[Wanted]) -> bool:
        """Whether the last plan also fits the next round of the same rows, whatever this round decides."""
        if self.shares is None or any(one.source and one.source.reads_outputs for one in self.shares):
            return False
        if self._live_entries(live) != self._plan.live:
            return False
        if [one.siblings for one in self._wanted] != [one.siblings for one in wanted]:
            return False
        asked = [(one.length, one.drafter, one.entropy_limit) for one in self.shares]
        return asked == [(one.length, one.drafter if one.length else None, one.entropy_limit) for one in wanted]

    def _live_entries(self, live: Sequence[Request]) -> int | None:
        """Return how much of the caches is read by the next round, and by one launched before that is read."""
        width = self._plan.draft_length + self._plan.siblings + 1
        return self._bucket(max(request.length for request in live) + 2 * width)

    def _within_reach(self, shares: tuple[Share, ...]) -> tuple[Share, ...]:
        """Leave out siblings for which the target's widest step has no room behind the longest line.

        Then none of these rows is one whose text depends on its siblings.
        """
        room = self._most - max(one.length for one in shares)
        if all(one.siblings <= room for one in shares):  # nearly always
            return shares
        return tuple(one._replace(siblings=min(one.siblings, room)) for one in shares)

    def _share(self, request: Request, wanted: Wanted, draft_entries: int) -> Share:
        """Plan one row, which proposes nothing while its draft is behind or its drafter has nothing to offer."""
        source = self._drafters.get(wanted.drafter)
        nothing = Share(entropy_limit=wanted.entropy_limit)
        if source is None or (source.needs_model and not 2 <= request.length <= draft_entries + 2):
            return nothing
        length = source.ready(request, wanted.length)
        return Share(length, source, wanted.entropy_limit, wanted.siblings) if length else nothing


def make_plan(
    params: Sequence[SamplingParams], shares: Sequence[Share], *, vocab_size: int, traced: bool = False
) -> Plan:
    """Plan a round for rows with these parameters and shares."""
    longest = max(one.length for one in shares)
    wanted = {one.source for one in shares if one.source is not None}
    filters = [one for one in FILTERS if any(map(one.active, params))]
    own_draft = any(one.own_draft_temperature != one.temperature for one in params)
    limited = any(one.entropy_limit not in (None, 1) for one in shares)
    tests = {one.test for one in params}
    logprobs = [one.logprobs for one in params if one.logprobs is not None]
    return Plan(
        batch=len(params),
        draft_length=longest,
        siblings=max(one.siblings for one in shares),
        sources=tuple(sorted(wanted, key=lambda source: source.place)),
        filters=tuple(filters),
        draft_filters=tuple(one for one in FILTERS if one in filters or one is TEMPERATURE) if own_draft else (),
        own_draft=own_draft,
        ragged=limited or any(one.length < longest or (one.source and one.source.may_come_short) for one in shares),
        lines=any(one.siblings for one in shares)
        and any(
            not one.siblings and (each.test != "coupled" or each.lenient)
            for one, each in zip(shares, params, strict=True)
        ),
        rejection="rejection" in tests,
        tokenwise="tokenwise" in tests,
        coupled="coupled" in tests,
        gumbel=any(not one.greedy and one.rule == "coupled" for one in params),
        lenient=any(one.lenient for one in params),
        logprobs=min(max(logprobs), vocab_size) if logprobs else None,
        traced=traced,
        entropies=any(one.length and one.entropy_limit is not None for one in shares),
    )
