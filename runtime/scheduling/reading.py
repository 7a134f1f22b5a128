"""Reads the prompts of new requests between rounds, and picks their first tokens."""

from collections.abc import Mapping, Sequence
from sys import maxsize

import torch
from torch import Tensor

from ...engines import PREFILL_WIDTH
from ..beams.beaming import Beaming
from ..drafters.windows import Windows
from ..memory.full import CacheFull
from ..memory.model import Model
from ..requests.request import Request, failing
from ..sources.encoder import Encoder
from ..state.plan import LEAST_WINDOW
from ..state.rows import Rows
from .capture import Rounds
from .frames import Frames
from .occupants import Occupant, neighbours, refresh_uniforms
from .planning import Share, make_plan
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
    ) -> None:
        self._rows, self._target, self._seating, self._prefill, self._windows = rows, target, seating, prefill, windows
        self._frames, self._rounds, self._results = frames, rounds, results
        self._encoders = encoders

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
            return self._hear(seating.prefilling[0]), 0
        unread = {one.row: _entries_of_prompt(one.request) for one in heard}
        if unscored := [one for one in heard if one.request.unscored]:
            return self._prefill.score(self._target, unscored[0].request, unscored[0].row), 0
        fed, logits = self._prefill.read(self._target, unread, budget)
        whole = [one for one in heard if self._target.cache.entries[one.row] == unread[one.row]]
        whole.sort(key=lambda one: one.row)
        for occupant in whole:
            seating.keep_prefix(occupant)
        begin = [one for one in whole if one.row in logits and not one.request.token_ids]
        for occupant in (one for one in begin if one.request.params.num_beams > 1):
            with failing(occupant.request):
                occupant.beaming = Beaming(occupant.request, self._target, logits[occupant.row])
        begin = [one for one in begin if one.request.params.num_beams == 1]
        for some in neighbours(begin):
            self._first_tokens(some, logits)
        seating.leave(whole)
        whole = [one for one in whole if not one.request.finished]
        lacking = self._lacking([one for one in whole if one.beaming or one.request.params.keeps_its_draft])
        left = self._prefill.catch_up(lacking, draft_budget)
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
        return fed or budget, draft_budget - left

    def _heard(self, occupant: Occupant) -> bool:
        """Whether a row has what there is of its source."""
        sources = self._target.cache.sources
        return sources is None or sources.entries[occupant.row] > 0

    def _hear(self, occupant: Occupant) -> int:
        """Let the encoders read the source of a request; return what of the budget that takes, a token at least."""
        source, key = occupant.request.source, occupant.request.cache_salt
        assert source is not None
        return max(1, *(encoder.read(occupant.row, source, key) for encoder in self._encoders))

    def _first_tokens(self, occupants: Sequence[Occupant], logits: Mapping[int, Tensor]) -> None:
        """Pick the tokens after the prompts of neighbouring rows, as a round without proposals does.

        The target has given the logits [1, V] of each row. Speculation does not count these tokens.
        """
        requests, share = [one.request for one in occupants], Share()
        plan = make_plan(
            [request.params for request in requests],
            [share] * len(requests),
            vocab_size=self._target.vocab_size,
            traced=any(request.trace is not None for request in requests),
        )
        refresh_uniforms(self._rows, plan, occupants)
        given = torch.stack([logits[one.row][:, : self._target.vocab_size] for one in occupants])
        frame = self._frames.of(plan, prefilled=True)
        frame.target_logits.copy_(given)
        rows, span = self._rows.view(plan.batch, occupants[0].row), max(request.length for request in requests) + 1
        for occupant, result in zip(occupants, self._rounds.run(rows, plan, frame, span).results(), strict=True):
            self._results.give(occupant, share, result)
            occupant.request.report()

    def catch_up(self, live: Sequence[Occupant], window: int) -> None:
        """Let drafts read what they lack for the next round, within their budget.

        A draft that its request keeps is never behind: it lacks no more than a round has committed.
        """
        lacking = self._lacking(live, window)
        kept = {one.row: lacking.pop(one.row) for one in live if one.request.params.keeps_its_draft}
        for some, budget in ((kept, maxsize), (lacking, DRAFT_BUDGET)):
            if some:
                self._prefill.catch_up(some, budget)

    def _lacking(self, occupants: Sequence[Occupant], window: int = LEAST_WINDOW) -> dict[int, dict[Model, int]]:
        """Return by row how many entries each draft that may run next needs, without those that it reads first."""
        return {
            one.row: {
                draft: one.request.length - own for draft, own in self._windows.of(one.chooser.wanted, window).items()
            }
            for one in occupants
        }


def _entries_of_prompt(request: Request) -> int:
    """Return how many cache entries reading a prompt gives: all, because the first token of the output comes with them.

    A prompt of one token is left to the first round, as is the last token of a request that goes on; but not of one
    with beams, which begins anew.
    """
    left = request.token_ids or (request.length == 1 and request.params.num_beams == 1)
    return request.length - 1 if left else request.length
