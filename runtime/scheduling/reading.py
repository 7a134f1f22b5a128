"""Reads the prompts of new requests between rounds, and picks their first tokens."""

from collections.abc import Collection, Mapping, Sequence
from sys import maxsize

import torch
from torch import Tensor

from ...engines import PREFILL_WIDTH
from ..beams.beaming import Beaming
from ..drafters.windows import Windows
from ..memory.full import CacheFull
from ..memory.model import Model
from ..requests.request import Request, failing
from ..sources.encoder import Encoder, Wanted
from ..sources.eyes import Eyes
from ..state.asked import NOTHING
from ..state.plan import LEAST_WINDOW
from ..state.rows import Rows
from .capture import Frames, Rounds
from .occupants import Occupant, neighbours, refresh_uniforms
from .planning import make_plan
from .prefill import DRAFT_BUDGET, Prefill
from .results import Results
from .seating import Seating


class Reading:
    """Takes requests from the queue to the rounds."""

    def __init__(
        self,
        rows: Rows,
        target: Model,
        seating: Seating,
        prefill: Prefill,
        windows: Windows,
        frames: Frames,
        rounds: Rounds,
        results: Results,
        encoders: Sequence[Encoder],
        eyes: Eyes | None = None,
    ) -> None:
        self._rows, self._target, self._seating, self._prefill, self._windows = rows, target, seating, prefill, windows
        self._frames, self._rounds, self._results = frames, rounds, results
        self._encoders, self._eyes = encoders, eyes

    def read_prompts(self) -> None:
        """Read prompts until more would keep live rows waiting for long."""
        budget, draft_budget = PREFILL_WIDTH, DRAFT_BUDGET
        while budget > 0 and (self._seating.prefilling or self._seating.waiting):
            try:
                read, read_by_drafts = self._read_some(budget, draft_budget)
            except CacheFull as error:
                self._seating.preempt(error)
            else:
                budget, draft_budget = budget - read, draft_budget - read_by_drafts

    def _read_some(self, budget: int, draft_budget: int) -> tuple[int, int]:
        """Let the target read prompts in one call; return how many tokens that and the drafts have spent.

        A request gets the first token of its output with the last of its prompt. A prompt of one token is left to the
        first round. The draft reads later, between rounds; a request that keeps its draft waits until it has read.
        """
        seating = self._seating
        while seating.admit():
            pass
        heard = [one for one in seating.prefilling if self._heard(one)]
        if seating.prefilling and not heard:
            return self._hear(seating.prefilling, [self._target], budget), 0
        seen, ready = self._see({one: self._target.cache.entries[one.row] for one in heard})
        if heard and not ready:
            return seen, 0
        unread = {one.row: _entries_of_prompt(one.request) for one in ready}
        if unscored := [one for one in ready if one.request.unscored]:
            return self._prefill.score(self._target, unscored[0].request, unscored[0].row), 0
        fed, logits = self._prefill.read(self._target, unread, budget)
        whole = [one for one in ready if self._target.cache.entries[one.row] == unread[one.row]]
        whole.sort(key=lambda one: one.row)
        for occupant in whole:
            seating.keep_prefix(occupant)
        begin = [one for one in whole if one.row in logits and not one.request.token_ids]
        for occupant in (one for one in begin if one.request.params.num_beams > 1):
            with failing(occupant.request):
                said = logits[occupant.row][:, : self._target.vocab_size]  # what lies beyond is padding
                occupant.beaming = Beaming(occupant.request, self._target, said)
        begin = [one for one in begin if one.request.params.num_beams == 1]
        for some in neighbours(begin):
            self._first_tokens(some, logits)
        seating.leave(whole)
        whole = [one for one in whole if not one.request.finished]
        keeping = [one for one in whole if one.beaming or one.request.params.keeps_its_draft]
        lacking = self._lacking(keeping)
        self._hear(keeping, _drafts_of(lacking))
        shown, readable = self._show(keeping, lacking)
        left = self._prefill.catch_up(readable, draft_budget)
        for occupant in whole:
            own = lacking.get(occupant.row, {})
            if not all(draft.cache.entries[occupant.row] >= entries for draft, entries in own.items()):
                continue
            if occupant.beaming is None:
                seating.go_live(occupant)
            else:
                for draft in own:
                    occupant.beaming.draft_by(
                        draft, occupant.row, self._rows.tokens[occupant.row, : occupant.request.length]
                    )
                seating.go_searching(occupant)
        self._let_images_go({one: one.chooser.wanted.names for one in whole})
        return fed + seen + shown or budget, draft_budget - left

    def _heard(self, occupant: Occupant) -> bool:
        """Whether a row has what there is of its source."""
        sources = self._target.cache.sources
        return sources is None or sources.entries[occupant.row] > 0

    def _hear(self, occupants: Sequence[Occupant], models: Collection[Model], budget: int = maxsize) -> int:
        """Let the encoders that feed these models read the sources of requests, as far as the budget goes.

        Return what of it that takes, a token at least.
        """
        spent = 1
        for encoder in self._encoders:
            if any(map(encoder.feeds, models)):
                spent = max(spent, encoder.read(_sources_of(occupants, encoder), budget))
        return spent

    def _first_tokens(self, occupants: Sequence[Occupant], logits: Mapping[int, Tensor]) -> None:
        """Pick the tokens after the prompts of neighbouring rows, as a round without proposals does.

        The target has given the logits [1, V] of each row. Speculation does not count these tokens.
        """
        requests = [one.request for one in occupants]
        plan = make_plan(
            [request.params for request in requests],
            [NOTHING] * len(requests),
            {},
            vocab_size=self._target.vocab_size,
            traced=any(request.trace is not None for request in requests),
        )
        refresh_uniforms(self._rows, plan, occupants)
        given = torch.stack([logits[one.row][:, : self._target.vocab_size] for one in occupants])
        frame = self._frames.of(plan, prefilled=True)
        frame.target_logits.copy_(given)
        rows, span = self._rows.view(plan.batch, occupants[0].row), max(request.length for request in requests) + 1
        results = self._rounds.run(rows, plan, frame, span).results(range(len(occupants)))
        for occupant, result in zip(occupants, results, strict=True):
            self._results.give(occupant, NOTHING, result)
            occupant.request.report()

    def catch_up(self, live: Sequence[Occupant], window: int) -> None:
        """Let drafts read what they lack for the next round, within their budget.

        A draft that its request keeps never lacks more than a round has committed.
        """
        lacking = self._lacking(live, window)
        self._hear(live, _drafts_of(lacking))  # in all rows, since a draft's steps run in all of them
        keeping = [one for one in live if one.request.params.keeps_its_draft]
        while self._show(keeping, lacking)[0]:
            pass
        _, readable = self._show(live, lacking)
        kept = {one.row: readable.pop(one.row) for one in keeping}
        for some, budget in ((kept, maxsize), (readable, DRAFT_BUDGET)):
            if some:
                self._prefill.catch_up(some, budget)
        self._let_images_go({one: one.chooser.drafters for one in live})

    def _see(self, read: Mapping[Occupant, int]) -> tuple[int, list[Occupant]]:
        """Let requests have the images of what they have not read, of which one is seen now: so none waits for all.

        Return how many entries that makes, and the requests that lack none.
        """
        if self._eyes is None:
            return 0, list(read)
        seen = self._eyes.see({one.row: (one.request.cache_salt, entries) for one, entries in read.items()})
        return seen, [one for one, entries in read.items() if self._eyes.has_seen(one.row, entries)]

    def _show(
        self, occupants: Sequence[Occupant], lacking: Mapping[int, Mapping[Model, int]]
    ) -> tuple[int, dict[int, Mapping[Model, int]]]:
        """Let drafts see the images in what they lack. Nearly always the target has left these in the row.

        Return how many entries that makes, and what the drafts can read now.
        """
        if self._eyes is None:
            return 0, dict(lacking)
        late = {}
        for one in occupants:
            read = {draft: draft.cache.entries[one.row] for draft in lacking[one.row] if draft.images is not None}
            if begins := [entries for draft, entries in read.items() if entries < lacking[one.row][draft]]:
                late[one] = min(begins)
        shown, ready = self._see(late)
        waiting = {one.row for one in late.keys() - ready}
        return shown, {
            row: {draft: entries for draft, entries in own.items() if row not in waiting or draft.images is None}
            for row, own in lacking.items()
        }

    def _let_images_go(self, drafters: Mapping[Occupant, Sequence[str]]) -> None:
        """Let go of the images of prompts that all of these drafters have read which see; others see them again.

        Once a draft has begun to be shown them, those that may propose later count as well: it is shown one at a time.
        """
        if (images := self._target.images) is None:
            return
        for occupant, names in drafters.items():
            if end := images.end(occupant.row):
                drafts = self._windows.of(names)
                if all(one.images is None or one.cache.entries[occupant.row] >= end for one in drafts):
                    images.let_go(occupant.row)

    def _lacking(self, occupants: Sequence[Occupant], window: int = LEAST_WINDOW) -> dict[int, dict[Model, int]]:
        """Return by row how many entries each draft that may run next needs, without those that it reads first."""
        return {
            one.row: {
                draft: one.request.begin(own)
                for draft, own in self._windows.of(one.chooser.wanted.names, window).items()
            }
            for one in occupants
        }


def _sources_of(occupants: Sequence[Occupant], encoder: Encoder) -> dict[int, Wanted]:
    """Return the sources that this encoder has not read, by row."""
    each = ((one.row, one.request) for one in occupants if encoder.lacks(one.row))
    return {
        row: Wanted(request.cache_salt, request.source, request.adapter)
        for row, request in each
        if request.source is not None
    }


def _drafts_of(lacking: Mapping[int, Mapping[Model, int]]) -> set[Model]:
    return {draft for own in lacking.values() for draft in own}


def _entries_of_prompt(request: Request) -> int:
    """Return how many cache entries reading a prompt gives: all, because the first token of the output comes with them.

    A prompt of one token is left to the first round, as is the last token of a request that goes on; but not of one
    with beams, which begins anew, and not an image, which no round reads.
    """
    left = request.token_ids or (request.length == 1 and request.params.num_beams == 1 and request.sight is None)
    return request.length - 1 if left else request.length
