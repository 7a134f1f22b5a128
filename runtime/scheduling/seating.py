"""Gives requests rows: who waits, whose prompt is being read, who decodes or searches, and who gives its place up."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from weakref import WeakSet

from ...engines import BLOCK_TOKENS, MOST_SLOTS, RequestError
from ..acceptance.seat import admit, follow_guide, resume
from ..drafters import Drafter
from ..lengths.drafting import DraftingRules
from ..memory.budget import Budget
from ..memory.full import CacheFull
from ..memory.model import Model
from ..memory.prefixes import Prefixes
from ..requests.request import Request, State
from ..state.rows import Rows
from .occupants import Occupant
from .prefill import NARROWEST


class Seating:
    """Live requests hold the first rows, those whose prompts are being read or that search the next ones; others wait.

    `submit` and `cancel` may be called from any thread, all else only between two rounds. `changed` is called when
    requests become live, end, or move to other rows.
    """

    def __init__(
        self,
        rows: Rows,
        models: Sequence[Model],
        drafters: Iterable[Drafter],
        rules: DraftingRules,
        kept_blocks: int,
        changed: Callable[[], None],
    ) -> None:
        self.live: list[Occupant] = []  # occupant i decodes in row i
        self.prefilling: list[Occupant] = []  # in the order of their arrival
        self.searching: list[Occupant] = []  # with beams, in rounds of their own
        self.waiting: deque[Request] = deque()
        self._alike = [model for model in models if not model.own_tokens]  # that read the tokens of requests
        self.prefixes = Prefixes([model.cache for model in self._alike], kept_blocks)
        self._rows, self._models, self._target = rows, models, models[0]
        self._drafters, self._rules = list(drafters), rules
        self._adapters, self._images = models[0].adapters, models[0].images
        self._seeing = [model for model in models if model.images is not None]
        self._budget = Budget(models)
        self._changed = changed
        self._submitted: WeakSet[Request] = WeakSet()
        self._queue_lock = threading.Lock()
        self._admitted = 0
        self._max_rows = len(rows.length)
        self._most_rows = self._max_rows  # fewer for as long as memory has run out
        # However long its rows become, and however wide its rounds.
        self._never_full = self._budget.admits([rows.tokens.shape[1]] * self._max_rows, MOST_SLOTS // 2)

    @property
    def occupants(self) -> list[Occupant]:
        return [*self.live, *self._after_live]

    @property
    def _after_live(self) -> list[Occupant]:
        """Return the occupants whose rows come after the live ones."""
        return [*self.prefilling, *self.searching]

    @property
    def is_empty(self) -> bool:
        return not (self.live or self.prefilling or self.searching or self.waiting)

    @property
    def may_change(self) -> bool:
        """Whether a request may join the live ones before the next round, or leave them."""
        ends = any(one.ended for one in self.live)
        return ends or bool(self.prefilling or self.searching or (self.waiting and len(self.live) < self._most_rows))

    def submit(self, request: Request) -> None:
        with self._queue_lock:
            self._submitted.add(request)
            place = len(self.waiting)
            while place and self.waiting[place - 1].priority > request.priority:
                place -= 1
            self.waiting.insert(place, request)

    def cancel(self, request: Request) -> None:
        with self._queue_lock:
            if request not in self._submitted:
                raise RequestError("the request belongs to another decoder; cancel it there")
            if request in self.waiting:
                self.waiting.remove(request)
                request.finish("cancelled")
            request.cancelled = True

    def can_hold(self, request: Request) -> bool:
        """Whether the caches can ever hold a request."""
        return self._have_memory([request])

    def admit(self) -> bool:
        """Give the next waiting request a row, if a row and the memory are free; return whether to ask again."""
        row = len(self.occupants)
        with self._queue_lock:
            if not self.waiting or row >= self._most_rows:
                return False
            fits = self._has_memory(self.waiting[0])
            if row and not fits:
                return False
            request = self.waiting.popleft()
        if not fits:  # it fitted when it was submitted, but never will now
            _fail(request, CacheFull("its rounds have become too wide for cache_bytes; ask for fewer proposals"))
            return True
        drafting = request.drafting
        self._admitted += 1
        occupant = Occupant(request, drafting, self._rules.chooser(drafting, request.adapter), row, self._admitted)
        self.prefilling.append(occupant)
        request.state = State.PREFILLING
        admit(self._rows, row, request.prompt, request.params, request.noise_seed, self._target.vocab_size)
        if request.source is not None and request.source.ids:
            self._rows.note_source(row, request.prompt, request.source.ids)
        if request.token_ids:  # it had given up its place
            resume(self._rows, row, request.params, request.token_ids)
        follow_guide(self._rows, row, request.guide)
        if self._adapters is not None:
            self._adapters.seat(row, request.adapter)
        if self._images is not None:
            self._images.seat(row, request.sight)
            self._rows.images_end[row] = request.images_end
        for drafter in self._drafters:
            drafter.seated(request, self._rows, row)
        self._reuse_prefix(occupant)
        return True

    def _has_memory(self, joining: Request) -> bool:
        """Whether a request fits beside those that have rows, however long all of them become."""
        together = [joining, *(occupant.request for occupant in self.occupants)]
        if self._never_full and all(request.params.num_beams == 1 for request in together):
            return True
        return self._have_memory(together)

    def _have_memory(self, together: Sequence[Request]) -> bool:
        """Whether requests fit together: all rows of a round are as wide, and slots are made for what is asked for."""
        drafting = [request.drafting for request in together]
        width, longest = max(one.widest() for one in drafting), max(one.longest for one in drafting)
        widest = max(one.widest(longest) for one in drafting)
        return self._budget.admits([request.most_entries + width for request in together], widest)

    def go_live(self, occupant: Occupant) -> None:
        """Let a request take part in the rounds, in the row after the live ones."""
        row = len(self.live)
        if occupant.row != row:
            [other] = [one for one in self._after_live if one.row == row]
            for model in self._models:  # all of them, before anything has changed: one may have no memory
                model.cache.make_room_to_swap(occupant.row, row)
            self._rows.swap(occupant.row, row)
            if self._adapters is not None:
                self._adapters.swap(occupant.row, row)
            if self._images is not None:
                self._images.swap(occupant.row, row)
            for model in self._models:
                model.cache.swap(occupant.row, row)
            occupant.row, other.row = row, occupant.row
        self.prefilling.remove(occupant)
        occupant.request.state = State.LIVE
        self.live.append(occupant)
        self._changed()

    def go_searching(self, occupant: Occupant) -> None:
        """Let a request with beams take rounds of its own, in the row that it has."""
        self.prefilling.remove(occupant)
        self.searching.append(occupant)
        occupant.request.state = State.LIVE

    def leave(self, among: Iterable[Occupant] | None = None) -> None:
        """Free the rows of requests that have ended, among all or among these; the others close up."""
        ended = [one for one in (self.occupants if among is None else among) if one.ended]
        if not ended:  # nearly always
            return
        for occupant in sorted(ended, key=lambda one: one.row, reverse=True):
            self._free(occupant)
            self._close_up(occupant)

    def _close_up(self, freed: Occupant) -> None:
        """Move the last live row into one that is free, and the last of those after the live ones into its place."""
        gap = freed.row
        if freed in self._after_live:
            (self.prefilling if freed in self.prefilling else self.searching).remove(freed)
        else:
            self._changed()
            last = self.live.pop()
            gap = last.row
            if last is not freed:
                self.live[freed.row] = last
                self._move(last, freed.row)
        if self._after_live:
            last = max(self._after_live, key=lambda one: one.row)
            if last.row > gap:
                self._move(last, gap)

    def _free(self, occupant: Occupant) -> None:
        if not occupant.request.finished:
            occupant.request.finish("cancelled")
            occupant.request.report()
        self._most_rows = self._max_rows
        if occupant.beaming is not None:
            occupant.beaming.leave(occupant.row)
        self.keep_prefix(occupant)
        if self._images is not None:
            self._images.seat(occupant.row, None)
        for model in self._models:
            model.cache.free(occupant.row)
        for drafter in self._drafters:
            drafter.ended(occupant.request)
        if self._rules.controller is not None:
            self._rules.controller.ended(occupant.chooser)

    def preempt(self, error: CacheFull) -> None:
        """Let the youngest request give up its place: it waits again, and goes on with the same text.

        One that is alone ends with the error.
        """
        rows_taken = len(self.occupants)
        youngest = max(self.occupants, key=lambda one: one.number)
        if rows_taken == 1:
            _fail(youngest.request, error)
            self.leave()
            return
        youngest.request.state = State.WAITING
        for drafter in self._drafters:
            drafter.gave_up(youngest.request, self._rows, youngest.row)
        with self._queue_lock:
            self.waiting.appendleft(youngest.request)
        if self._images is not None:
            self._images.seat(youngest.row, None)
        for model in self._models:
            model.cache.free(youngest.row)
        self._close_up(youngest)
        self._most_rows = rows_taken - 1

    def keep_prefix(self, occupant: Occupant) -> None:
        """Keep what the caches have of a request for others that begin alike; nothing of a prompt that is scored."""
        request = occupant.request
        if request.unscored:
            return  # its entries come from narrower steps than those of a prompt that is read
        tokens, salt = (*request.prompt, *request.token_ids), request.cache_salt
        self.prefixes.extend(occupant.keys, tokens, salt, request.marks)
        for model in self._alike:
            self.prefixes.leave(model.cache, occupant.row, occupant.keys, tokens, salt, request.marks)

    def _reuse_prefix(self, occupant: Occupant) -> None:
        """Begin with what an earlier request has left; the end is read as it would be without that."""
        request, row = occupant.request, occupant.row
        if request.unscored:
            return  # all of its prompt is read for log-probabilities first
        tokens = (*request.prompt, *request.token_ids)
        self.prefixes.extend(occupant.keys, tokens, request.cache_salt, request.marks)
        most = max(0, len(tokens) - NARROWEST) // BLOCK_TOKENS
        for model in self._alike:
            self.prefixes.reuse(model.cache, row, occupant.keys[:most])
        for model in self._seeing:  # an image that was found in part is read again
            assert model.images is not None
            model.cache.entries[row] = model.images.begun(row, model.cache.entries[row])
        request.cached_tokens = min(len(request.prompt), self._target.cache.entries[row])
        self.prefixes.asked_tokens += len(request.prompt)
        self.prefixes.found_tokens += request.cached_tokens

    def _move(self, occupant: Occupant, row: int) -> None:
        self._rows.move(occupant.row, row)
        if self._adapters is not None:
            self._adapters.move(occupant.row, row)
        if self._images is not None:
            self._images.move(occupant.row, row)
        for model in self._models:
            model.cache.move(occupant.row, row)
        occupant.row = row

    def end_all(self, error: BaseException) -> None:
        """End every request that has a row with this error; later requests start on clean rows."""
        ended = self.occupants
        for some in (self.live, self.prefilling, self.searching):
            some.clear()
        self._changed()
        for model in self._models:
            model.cache.clear()
        self.prefixes.forget()
        for occupant in ended:
            _fail(occupant.request, error)

    def end_waiting(self, error: BaseException) -> None:
        """End every waiting request with this error."""
        with self._queue_lock:
            waiting = list(self.waiting)
            self.waiting.clear()
        for request in waiting:
            _fail(request, error)


def _fail(request: Request, error: BaseException) -> None:
    if not request.finished:
        request.fail(error)
        request.report()
