"""Runs the application in uvicorn: it says where it listens, and drains on SIGTERM."""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from ssl import SSLContext
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from uvicorn.loops.auto import auto_loop_factory

from ...engines.errors import counted, first_line
from ..console import say
from .connections import Connection, raise_file_limit
from .delivery import first_of
from .service import Service
from .stepper import BROKEN

log = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGINT)
LINGER_SECONDS = 5  # for clients that are slow to take the end of an answer


class Beside(NamedTuple):
    """What answers on a port of its own."""

    app: Starlette
    listener: socket.socket


class Server(uvicorn.Server):
    """uvicorn, but the signals are ours: it goes on to answer while requests are drained."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    app: Starlette,
    service: Service,
    listener: socket.socket,
    drain_seconds: float,
    announce: Callable[[], None],
    tls: SSLContext | None = None,
    read_again: Callable[[], None] | None = None,
    beside: Beside | None = None,
) -> int:
    """Serve until SIGTERM or Ctrl-C; then finish what runs, within `drain_seconds`. A second signal ends at once.

    SIGHUP reads keys and certificates again, if there are files of them; where they cannot be used, those that were
    read go on.

    A decoder that has failed ends it, too. Return an exit code, which makes a supervisor start it again then.
    """

    async def until_a_signal() -> None:
        asked = [asyncio.Event(), asyncio.Event()]

        def ask() -> None:
            next((one for one in asked if not one.is_set()), asked[0]).set()

        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, ask)
        if read_again is not None:  # else SIGHUP ends the process, as it does where nobody handles it
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, read_again)
        announce()
        await serve_until(asked[0], asked[1], app, service, listener, drain_seconds, tls, beside)

    Connection.most = raise_file_limit()
    gc.collect()
    gc.freeze()  # what is loaded stays loaded: each time it was looked through again, all streams stopped for 0.1 s
    run_loop(until_a_signal())
    error = service.stepper.error
    if error is not None:
        say(f"the decoder has failed ({first_line(error)}); start the server again")
    service.stepper.leave_if_stuck()
    return 0 if error is None else BROKEN


def run_loop(serving: Coroutine[Any, Any, None]) -> None:
    """Run in uvloop where it is installed: it spends less on each chunk than asyncio's own loop."""
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(serving)


async def serve_until(
    end: asyncio.Event,
    end_now: asyncio.Event,
    app: Starlette,
    service: Service,
    listener: socket.socket,
    drain_seconds: float,
    tls: SSLContext | None = None,
    beside: Beside | None = None,
) -> None:
    """Serve until `end` is set, then drain; `end_now` cuts that short."""
    servers = [make_server(app, tls)]
    listeners = [listener]
    if beside is not None:
        servers.append(make_server(beside.app, tls))
        listeners.append(beside.listener)
    service.stepper.start()
    serving = asyncio.gather(*(server.serve(sockets=[one]) for server, one in zip(servers, listeners, strict=True)))
    try:
        await first_of(end.wait(), first_of(asyncio.shield(serving), service.stepper.dead.wait()))
        log.info("draining %s", counted(len(service.stepper.tickets), "request"))
        if not await first_of(service.stepper.drain(drain_seconds), end_now.wait()):
            await service.stepper.drain(0)
        for server in servers:
            server.should_exit = True
        await serving
    finally:
        await service.stepper.close()


def make_server(app: Starlette, tls: SSLContext | None = None) -> Server:
    connection = type("Connection", (Connection,), {"tls": tls})
    config = uvicorn.Config(
        app,
        http=connection,  # of h11: httptools loses the body of a request that offers HTTP/2, as Java's clients do
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=LINGER_SECONDS,
    )
    return Server(config)
