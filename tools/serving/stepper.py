"""One thread steps the decoder; the event loop submits, cancels, and is woken once after each round.

It wakes the clients at once, unless requests wait for a row: then the news of some rounds go out together, because
what that saves is time for rounds. An end is reported at once.
"""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf

from ...engines import EngineEnded, EngineError
from ...engines.errors import first_line
from ...runtime import Decoder, Request
from .allowances import Allowances
from .errors import ApiError, unavailable
from .tickets import RequestGroup, Submission, Ticket

log = logging.getLogger(__name__)

MERGED_SECONDS = 0.03  # between two chunks of a stream, at least, while requests wait for a row
PAUSE_SECONDS = 0.05  # after a failed round: one that fails at once, again and again, must not fill the log
ENDED_BY_DEATH = "the decoder has failed ({reason}), the server ends; send the request to another"
IDLE_SECONDS = 5  # after which an engine that has nothing to do is asked whether it is still there,
WAITING_SECONDS = 5  # and one that has not come back from a step;
LEAVING_SECONDS = 1  # that the thread may take to notice by itself
STUCK_SECONDS = 300  # in one step; the longest that are known, which compile a model, take two minutes
CANCEL_SECONDS = 5  # for requests to end that were cancelled
BROKEN = 70  # the exit code of a process whose decoder has died, or never came back from a step
JOIN_SECONDS = 5  # that the end waits for a step, which may be stuck


class Stepper:
    """Owns the decoder's thread. All methods are called by the event loop, and none waits for a round."""

    def __init__(self, decoder: Decoder, max_waiting: int, on_end: Callable[[Ticket], None]) -> None:
        self.decoder, self.max_waiting = decoder, max_waiting
        self.draining = False
        self.tickets: set[Ticket] = set()  # of requests that have not ended, as far as the loop knows
        self.allowances = Allowances()
        self.places: list[str] = []  # the callers of what asks for one request after another, and has not ended
        self._on_end = on_end
        self._progressed: set[Ticket] = set()  # in this step; only the stepping thread touches it
        self._unwoken: set[Ticket] = set()
        self._last_woken = -inf  # when clients were last woken
        self._timer: asyncio.TimerHandle | None = None
        self._work = threading.Event()
        self._closing = False
        self._step_began: float | None = None  # None: between two steps
        self.error: BaseException | None = None  # that ended the thread before its time
        self.dead = asyncio.Event()
        self._all_ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._watching: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._keep_stepping, name="trt-spec-steps", daemon=True)

    def start(self) -> None:
        """Begin to step, for the event loop that is running."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._watching = asyncio.create_task(self._watch())

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def state(self) -> str:
        """Whether its thread is alive, dead, or stuck in a step."""
        if not self.alive or self.error is not None:
            return "dead"
        return "stuck" if self.step_seconds > STUCK_SECONDS else "alive"

    @property
    def step_seconds(self) -> float:
        """How long the step under way has taken."""
        began = self._step_began
        return 0.0 if began is None else time.perf_counter() - began

    @property
    def most(self) -> int:
        """The most requests that may be live and waiting together."""
        return self.decoder.max_batch + self.max_waiting

    def refuse_if_full(self, count: int) -> None:
        """Refuse requests for which there is no place now, or never."""
        if self.error is not None:
            raise unavailable(ENDED_BY_DEATH.format(reason=first_line(self.error)), "engine_dead")
        if self.draining:
            raise unavailable("the server is shutting down and takes no new requests; ask another", "shutting_down")
        if count > self.most:
            raise ApiError(
                400, f"{count} completions are asked for, this server takes {self.most} at once; ask for less"
            )
        taken = len(self.takers)
        if taken + count > self.most:
            raise unavailable(
                f"{taken} requests are live or waiting, this server takes {self.most}; try again soon", "queue_full"
            )

    @property
    def takers(self) -> list[str]:
        """The caller of each place that is taken."""
        return [*self.places, *(ticket.caller for ticket in self.tickets if not ticket.placed)]

    @contextmanager
    def place(self, caller: str) -> Iterator[None]:
        """Take a place for what will ask for one request after another, and is let finish where the server drains."""
        self.refuse_if_full(1)
        self.allowances.require_rows(1, self.takers, caller)
        self.places.append(caller)
        try:
            yield
        finally:
            self.places.remove(caller)
            self._note_the_last()

    def submit(self, wanted: Sequence[Submission], every_round: bool, *, placed: bool = False) -> RequestGroup:
        """Submit requests, all or none; `every_round` tells their client of each round, else only of the end.

        They take places, unless they are part of what has a place.
        """
        if not placed:
            self.refuse_if_full(len(wanted))
            for caller in {one.caller for one in wanted}:
                self.allowances.require_rows(len(wanted), self.takers, caller)
        elif self.error is not None:
            raise unavailable(ENDED_BY_DEATH.format(reason=first_line(self.error)), "engine_dead")
        wake = asyncio.Event()
        tickets: list[Ticket] = []
        try:
            for one in wanted:
                ticket = Ticket(wake, placed, one.caller)
                ticket.request = self.decoder.submit(
                    one.prompt,
                    one.params,
                    draft_length=one.draft_length,
                    drafter=one.drafter,
                    cache_salt=one.cache_salt,
                    prediction=one.prediction,
                    priority=one.priority,
                    source=one.source,
                    adapter=one.adapter,
                    images=one.pictures,
                    said=one.said,
                    on_progress=self._noting(ticket, every_round),
                )
                tickets.append(ticket)
                self.tickets.add(ticket)
        except BaseException:
            self.cancel(tickets)
            raise
        self._work.set()
        return RequestGroup(tickets, wake, self.cancel)

    def cancel(self, tickets: Sequence[Ticket]) -> None:
        """End requests: a waiting one at once, a live one within a round."""
        for ticket in tickets:
            if not ticket.request.finished:
                self.decoder.cancel(ticket.request)
            if ticket.request.finished:
                self._forget(ticket)
        self._work.set()

    async def drain(self, seconds: float) -> None:
        """Take no new requests, let those under way finish, and cancel what is left after so many seconds."""
        self.draining = True
        if not await self._wait_for_all(seconds):
            log.warning("%d requests are cancelled, because the time to drain is over", len(self.tickets))
            self.cancel(list(self.tickets))
            await self._wait_for_all(CANCEL_SECONDS)

    async def close(self) -> None:
        """End the thread, unless it is stuck in a step."""
        self._closing = self.draining = True
        if self._watching is not None:
            self._watching.cancel()
        self._work.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, JOIN_SECONDS)

    async def _wait_for_all(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while self.tickets or self.places:
                    self._all_ended.clear()
                    await self._all_ended.wait()
        except TimeoutError:
            return False
        return True

    def _noting(self, ticket: Ticket, every_round: bool) -> Callable[[Request], None]:
        begun = False

        def note(request: Request) -> None:
            nonlocal begun
            if every_round or request.finished:
                self._progressed.add(ticket)
                if not begun and not request.finished:
                    begun = True
                    self._report()  # a request's first news goes out at once: the step goes on with drafts and a round

        return note

    def _hear(self, tickets: set[Ticket]) -> None:
        """Wake the clients of these requests, now or soon."""
        self._unwoken |= tickets
        crowded = len(self.tickets) > self.decoder.max_batch
        wait = self._last_woken + MERGED_SECONDS - time.perf_counter() if crowded else 0.0
        if wait <= 0:
            self._tell()
            return
        ended = {ticket for ticket in tickets if ticket.request.finished}
        self._unwoken -= ended
        self._wake(ended)
        if self._timer is None:
            self._timer = self._loop.call_later(wait, self._tell)

    def _tell(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._last_woken = None, time.perf_counter()
        tickets, self._unwoken = self._unwoken, set()
        self._wake(tickets)

    def _wake(self, tickets: set[Ticket]) -> None:
        for ticket in tickets:
            if ticket.request.finished:
                self._forget(ticket)
            ticket.wake.set()

    def _forget(self, ticket: Ticket) -> None:
        if ticket in self.tickets:
            self.tickets.remove(ticket)
            ticket.context.run(self._on_end, ticket)
            ticket.wake.set()
        self._note_the_last()

    def _note_the_last(self) -> None:
        if not self.tickets and not self.places:
            self._all_ended.set()

    # The stepping thread.

    def _keep_stepping(self) -> None:
        try:
            self._step_until_closed()
        except BaseException as error:  # a library has panicked: nothing that it holds can be relied upon
            self.error = self.error or error  # of which the clients have been informed
            log.critical("the decoder's thread has died: %s", error, exc_info=error)
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._end_all)

    async def _watch(self) -> None:
        """End where a device has gone for which a step waits: it may never come back."""
        while self.error is None:
            await asyncio.sleep(WAITING_SECONDS)
            if self.step_seconds > WAITING_SECONDS and (why := await asyncio.to_thread(self._gone)):
                self.error = self.error or EngineEnded(why)  # the thread may have noticed by itself meanwhile
                await asyncio.to_thread(self._thread.join, LEAVING_SECONDS)
                self._end_all()

    def _gone(self) -> str:
        try:
            return self.decoder.target.engine.gone()
        except Exception:  # whatever it is, the next time may tell
            log.exception("it is not known whether a device has gone")
            return ""

    def leave_if_stuck(self) -> None:
        """End the process without the thread, if that has not come back from a step: it holds what closing needs."""
        if self.alive:
            log.critical("the decoder is stuck in a step, and the process ends without it")
            logging.shutdown()
            os._exit(BROKEN)

    def _end_all(self) -> None:
        """Tell all clients that the decoder has failed; the event loop calls it."""
        assert self.error is not None
        error = EngineError(ENDED_BY_DEATH.format(reason=first_line(self.error)))
        for ticket in list(self.tickets):
            if not ticket.request.finished:
                ticket.request.fail(error)
            self._forget(ticket)
        self.dead.set()

    def _step_until_closed(self) -> None:
        while not self._closing:
            self._step_began = time.perf_counter()
            try:
                busy = self.decoder.step()
            except EngineEnded:  # no round can run any more
                raise
            except Exception as error:  # it has ended the requests of its round, whose owners learn of it; others go on
                log.exception("a round failed: %s", error)
                time.sleep(PAUSE_SECONDS)
                busy = True
            self._step_began = None
            self._report()
            if not busy:
                while not self._work.wait(IDLE_SECONDS):
                    self._step_began = time.perf_counter()  # that may be stuck, too
                    self.decoder.target.engine.require()
                    self._step_began = None
                self._work.clear()

    def _report(self) -> None:
        if self._progressed:
            progressed, self._progressed = self._progressed, set()
            with suppress(RuntimeError):  # the loop is closed, so nobody listens
                self._loop.call_soon_threadsafe(self._hear, progressed)
