"""Ends connections on which clients let us wait, and takes no more than there are file descriptors for.

uvicorn alone waits for ever for a request that never comes or comes a byte at a time, and for a client that never
takes its answer.
"""

import asyncio
import logging
import resource
import time
from asyncio.sslproto import SSLProtocol
from collections import deque
from ssl import SSLContext
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger(__name__)

HEADER_SECONDS = 30.0  # from the connection, TLS or the last answer to the end of a request's headers
BODY_SECONDS = 60.0  # from there to the end of its body: 4 MiB at half a megabit a second
TAKE_SECONDS = 120.0  # in which a client takes nothing; the system's own buffers empty in steps of a megabyte
LOOK_SECONDS = 1.0  # between two looks at a connection
LEAST_PART, MOST_PART = 2**12, 2**14  # bytes that are read at a time: few where they are chunks of a byte each,
PART_SECONDS = 1e-3  # since others wait for about so long
TAKING = "TAKING"  # a state beside those of h11: the client has an answer to take, and does not
WANTED_FILES = 2**16
OTHER_FILES = 64  # of the process: graphs, logs, a few sockets
WARNED_SECONDS = 60.0  # between two words about too many connections


def raise_file_limit() -> int:
    """Let the process open as many files as it may; return how many connections that leaves room for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return max(1, most - OTHER_FILES)


class Connection(H11Protocol):
    """One connection. Where there are too many, the one that has let us wait for longest makes room."""

    most = WANTED_FILES
    tls: SSLContext | None = None
    _timer: asyncio.TimerHandle
    _warned = -WARNED_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.transport is not None:  # it is made again, under TLS
            self._timer.cancel()
        super().connection_made(transport)
        self._since = time.monotonic()
        self._awaited: Any = h11.IDLE
        self._unread: deque[memoryview] = deque()
        self._part = LEAST_PART
        self._untaken, self._stalled = 0, False  # bytes of answers at the last look, and whether they are no less now
        self._timer = self.loop.call_later(LOOK_SECONDS, self._look)
        if len(self.connections) > self.most:
            self._make_room()
        if self.tls is not None and transport.get_extra_info("sslcontext") is None:
            self._shake_hands(transport, self.tls)

    def _shake_hands(self, transport: asyncio.Transport, tls: SSLContext) -> None:
        """Put TLS between this connection and the network; then the connection is made a second time.

        uvicorn would learn of a connection only when it has shaken hands, and those that never do would leave no room.
        """

        def end_unless_made_again(shaken: asyncio.Future[None]) -> None:
            error = shaken.exception()
            if self.transport is transport:
                self.connection_lost(error if isinstance(error, Exception) else None)

        shaken = self.loop.create_future()
        shaken.add_done_callback(end_unless_made_again)
        seconds: Any = HEADER_SECONDS
        between = SSLProtocol(self.loop, self, tls, shaken, server_side=True, ssl_handshake_timeout=seconds)
        transport.set_protocol(between)
        between.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._unread.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Read a part, and the rest when others have had their turn."""
        waits = bool(self._unread)
        self._unread.append(memoryview(data))
        if not waits:
            self._read_part()

    def _read_part(self) -> None:
        if not self._unread or self.transport.is_closing():
            return
        first, began = self._unread[0], time.thread_time()
        super().data_received(bytes(first[: self._part]))
        took = time.thread_time() - began
        self._note()
        if not self._unread:  # the connection has ended meanwhile
            return
        self._unread[0] = first[self._part :]
        if not self._unread[0]:
            self._unread.popleft()
        self._part = max(LEAST_PART, self._part // 2) if took > PART_SECONDS else min(MOST_PART, self._part * 2)
        if self._unread:
            self.loop.call_soon(self._read_part)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # the answer has begun, and nothing can be said after it
            self.transport.close()

    def shutdown(self) -> None:
        """End with the server: at once, if the request has not come yet."""
        super().shutdown()
        if self._awaited is h11.SEND_BODY:
            self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Say nothing: clients in Java offer HTTP/2 with each request, and are content without."""

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._note()

    def _note(self) -> None:
        """Note since when we have waited for what the client has to send or to take; None: for nothing."""
        state = self.conn.their_state
        awaited = TAKING if self._stalled else state if state in (h11.IDLE, h11.SEND_BODY) else None
        if awaited is not self._awaited:
            self._awaited, self._since = awaited, time.monotonic()

    def _look(self) -> None:
        before, self._untaken = self._untaken, self.transport.get_write_buffer_size()
        self._stalled = 0 < before <= self._untaken
        self._note()
        most = {h11.IDLE: HEADER_SECONDS, h11.SEND_BODY: BODY_SECONDS, TAKING: TAKE_SECONDS}.get(self._awaited)
        if most is not None and time.monotonic() - self._since > most:
            if self._stalled:
                log.info("a client has taken nothing of its answer in %g s, its connection is closed", most)
                self.transport.abort()
            elif not self.transport.is_closing():
                log.info("a client has sent no whole request in %g s, its connection is closed", most)
                self.transport.close()
        self._timer = self.loop.call_later(LOOK_SECONDS, self._look)

    def _make_room(self) -> None:
        kind = type(self)
        if time.monotonic() - kind._warned >= WARNED_SECONDS:
            kind._warned = time.monotonic()
            log.warning(
                "there are more than %d connections, as many as files may be open (ulimit -n): those that let the "
                "server wait are closed",
                self.most,
            )
        waited_for = [one for one in self.connections if isinstance(one, Connection) and one._awaited is not None]
        longest = min(waited_for, key=_since)
        longest._awaited = None
        longest.transport.abort()


def _since(connection: Any) -> float:
    return float(connection._since)
