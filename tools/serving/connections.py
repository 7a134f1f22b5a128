"""Ends connections on which clients let us wait, and takes no more than there are file descriptors for.

uvicorn alone waits for ever for a request that never comes, or comes a byte at a time.
"""

import asyncio
import logging
import resource
import time
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEADER_SECONDS = 30.0  # from the connection, or the last answer, to the end of a request's headers
BODY_SECONDS = 60.0  # from there to the end of its body: 4 MiB at half a megabit a second
LOOK_SECONDS = 1.0  # between two looks at a connection
WANTED_FILES = 2**16
OTHER_FILES = 64  # of the process: graphs, logs, a few sockets
TOLD_SECONDS = 60.0  # between two words about too many connections


def raise_file_limit() -> int:
    """Let the process open as many files as it may; return how many connections that leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(1, most - OTHER_FILES)


class Connection(H11Protocol):
    """One connection. Where there are too many, the one that has said nothing for longest makes room."""

    most = WANTED_FILES
    _told = -TOLD_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._since = time.monotonic()
        self._awaited: Any = h11.IDLE
        self._timer = self.loop.call_later(LOOK_SECONDS, self._look)
        if len(self.connections) > self.most:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def _note(self) -> None:
        """Note since when we have waited for what the client has to send; None: for nothing."""
        state = self.conn.their_state
        awaited = state if state in (h11.IDLE, h11.SEND_BODY) else None
        if awaited is not self._awaited:
            self._awaited, self._since = awaited, time.monotonic()

    def _look(self) -> None:
        self._note()
        most = {h11.IDLE: HEADER_SECONDS, h11.SEND_BODY: BODY_SECONDS}.get(self._awaited)
        if most is not None and time.monotonic() - self._since > most:
            log.info("a client has sent no whole request in %g s, its connection is closed", most)
            self.transport.close()
        else:
            self._timer = self.loop.call_later(LOOK_SECONDS, self._look)

    def _make_room(self) -> None:
        kind = type(self)
        if time.monotonic() - kind._told >= TOLD_SECONDS:
            kind._told = time.monotonic()
            log.warning(
                "there are more than %d connections, as many as files may be open (ulimit -n): idle ones are closed",
                self.most,
            )
        idle = [
            one
            for one in self.connections
            if isinstance(one, Connection) and one._awaited is h11.IDLE and not one.transport.is_closing()
        ]
        min(idle, key=_since).transport.close()


def _since(connection: Any) -> float:
    return float(connection._since)
