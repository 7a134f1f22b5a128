"""The requests of clients: what each asks for, and what its client waits for."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import NamedTuple

from ...runtime import Output, Piece, Request, SamplingParams
from ...runtime.images.picture import Picture
from ...runtime.memory.adapter_pool import Loaded
from ...runtime.sources.source import Source
from ...runtime.state.asked import DraftLength
from .errors import unavailable

ENDED_BY_DRAIN = "the server is shutting down and ended the request before its time; send it to another"


class Submission(NamedTuple):
    """One request to submit."""

    prompt: Sequence[int]
    params: SamplingParams
    draft_length: DraftLength | None = None
    drafter: str | None = None
    cache_salt: str = ""
    prediction: Sequence[int] = ()
    priority: int = 0
    source: Source | Sequence[int] | None = None
    caller: str = ""  # whose allowance it counts for
    adapter: str | Loaded | None = None  # by its name, or one that is held
    pictures: Sequence[Picture] = ()
    said: int = 0  # tokens at the prompt's end that the model has written itself


class Ticket:
    """A request, and what wakes the client that waits for it."""

    def __init__(self, wake: asyncio.Event, placed: bool, caller: str) -> None:
        self.request: Request
        self.wake = wake
        self.placed = placed  # it is part of what has a place already
        self.caller = caller
        self.context, self.submitted_ns = copy_context(), time.time_ns()  # for traces, which belong to what asked


class RequestGroup:
    """The requests of one client's call, under way together."""

    def __init__(self, tickets: list[Ticket], wake: asyncio.Event, cancel: Callable[[Sequence[Ticket]], None]) -> None:
        self.tickets, self._wake, self._cancel = tickets, wake, cancel

    @property
    def requests(self) -> list[Request]:
        return [ticket.request for ticket in self.tickets]

    def wake(self) -> None:
        """Let the client look, even if there is no news."""
        self._wake.set()

    async def progress(self) -> list[tuple[int, list[Piece], bool]]:
        """Wait for news and return them: the index of a request, its new pieces, and whether it has ended."""
        await self._wake.wait()
        self._wake.clear()
        news = []
        for index, ticket in enumerate(self.tickets):
            ended = ticket.request.finished  # read before the pieces, of which none follows the end
            news.append((index, ticket.request.take(), ended))
        return news

    async def ended(self) -> None:
        while not all(ticket.request.finished for ticket in self.tickets):
            await self._wake.wait()
            self._wake.clear()

    def output(self, index: int) -> Output:
        """Return the output of a request that has ended; raise what ended it before its time."""
        output = self.tickets[index].request.output()
        if output.finish_reason == "cancelled":
            raise unavailable(ENDED_BY_DRAIN, "shutting_down")
        return output

    def cancel(self) -> None:
        """End what has not ended, because nobody waits for it any more."""
        self._cancel(self.tickets)
