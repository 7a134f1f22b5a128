"""Where the processes of all shards meet: the first starts the others, or torchrun has started all of them."""

import atexit
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from hmac import compare_digest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from ...errors import EngineError, first_line
from .commands import END, Closed, Line

LONGEST_WAIT = timedelta(minutes=5)  # for another shard, be it to start or to compute
LOOPBACK = "127.0.0.1"
ADDRESS, PREFIX = "address", "trt-spec"
PORT, SECRET = "TRT_SPEC_STORE_PORT", "TRT_SPEC_SECRET"  # of the environment; torchrun's processes find it in the store
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
SECRET_S = 5  # seconds that whoever calls has to say it
READY, FAILED = "ready", "failed"
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
POLL_S = ENDING_S = 0.2
GLANCE_S = 0.01
GONE = 3  # the exit status of a shard that the others have left
LAST_S = 10  # seconds in which all others are to end


@dataclass(frozen=True)
class Group:
    """Which of how many processes this is; the first one leads."""

    rank: int
    shards: int


def by_torchrun() -> Group | None:
    """Return which of how many processes this is, if torchrun has started it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    return Group(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def device_by_torchrun(device: str) -> str:
    """Return the device of this process: each that torchrun has started has the one of its number on its node."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if by_torchrun() and device == "cuda" else device


def _join(store: Store, group: Group, device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    backend = BACKENDS[torch.device(device).type]
    dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.shards, timeout=LONGEST_WAIT)


class Gathering:
    """The other shards, as the first one has gathered them."""

    def __init__(self, bundle: Path, devices: Sequence[str], compiled: bool) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []
        self._ended = self._all_gone = False
        self._why = ""  # the others have ended, once that is known
        self.lines: list[Line] = []
        if dist.is_initialized():
            raise EngineError("this process is in a group of torch.distributed already; open the bundle in another")
        started, shards = by_torchrun(), len(devices)
        if started is not None and started.shards != shards:
            raise EngineError(
                f"torchrun has started {started.shards} processes for {shards} shards; start one for each"
            )
        host = LOOPBACK if started is None else os.environ["MASTER_ADDR"]
        try:
            with socket.create_server((host if started is None else "", 0)) as server:
                store, secret = self._store(started), secrets.token_hex()
                store.set(ADDRESS, f"{host} {server.getsockname()[1]}")
                if started is None:
                    for rank, device in enumerate(devices[1:], 1):
                        self._processes.append(_start(bundle, rank, device, compiled, store.port, secret))
                else:
                    store.set(SECRET, secret)
                self._accept(server, secret.encode(), shards - 1)
            for line in self.lines:
                [said, *why] = line.receive()[0]
                if said == FAILED:
                    raise EngineError(*why)
            _join(PrefixStore(PREFIX, store), Group(0, shards), devices[0])
        except (RuntimeError, OSError, Closed) as error:
            ended = self.who_ended() or first_line(error)
            self.end()
            raise EngineError(f"the {shards} shards did not meet ({ended})") from error
        except BaseException:
            self.end()
            raise
        self._store_kept = store  # it serves the others as long as it lives
        atexit.register(self.end)  # if nobody closes it: Python cannot end while threads of the group work

    def _store(self, started: Group | None) -> Any:
        if started is None:
            os.environ.setdefault(GLOO_INTERFACE, "lo")  # nobody else on the network is to be heard
            listener = socket.create_server((LOOPBACK, 0))
            port, heard = listener.getsockname()[1], listener.detach()  # torch closes it
            return TCPStore(
                LOOPBACK, port, None, True, LONGEST_WAIT, wait_for_workers=False, master_listen_fd=heard, use_libuv=True
            )
        return next(rendezvous("env://", timeout=LONGEST_WAIT))[0]

    def _accept(self, server: socket.socket, secret: bytes, others: int) -> None:
        """Wait until all other shards have called; a process that says no secret is none of them."""
        server.settimeout(POLL_S)
        until = time.monotonic() + LONGEST_WAIT.total_seconds()
        while len(self.lines) < others:
            if ended := self.who_ended(0):
                raise EngineError(f"{ended}, before it had started")
            if time.monotonic() > until:
                raise EngineError(
                    f"{others - len(self.lines)} of {others + 1} shards have not started; look at their messages"
                )
            try:
                connection, _ = server.accept()
            except TimeoutError:
                continue
            connection.settimeout(SECRET_S)
            line = Line(connection)
            try:
                known = compare_digest(line.take(len(secret)), secret)
            except EngineError:
                known = False
            if not known:
                line.close()
                continue
            connection.settimeout(LONGEST_WAIT.total_seconds())
            self.lines.append(line)

    def who_ended(self, seconds: float = ENDING_S) -> str:
        """Say which process that was started here has ended, if one has, or does so in so many seconds.

        It is one that has ended by itself, if there is any, and the same one from then on.
        """
        until, ended, own = time.monotonic() + seconds, dict[int, int](), None
        while len(ended) < len(self._processes):
            ended = {rank: found for rank, one in enumerate(self._processes, 1) if (found := one.poll()) is not None}
            own = next((rank for rank, status in ended.items() if status != GONE), None)
            if own is not None or time.monotonic() >= until:
                break
            time.sleep(GLANCE_S)
        rank = next(iter(ended), None) if own is None else own
        if rank is not None and not self._why:  # looked at last: whoever kills the others has set it before
            self._why = f"shard {rank} of the target has ended with status {ended[rank]}"
        return self._why

    def gone(self) -> str:
        """Say which other process has gone, if one has, and end those that were started here.

        While they are being ended, it is the reason for it, and nothing of those that are to end without one.
        """
        lost = any(line.gone for line in self.lines)  # before it is asked who has let them go
        if self._all_gone or not lost:
            return ""
        if not self._ended:
            self._why = self.who_ended() or "a shard's process has gone"
        if self._why:
            for process in self._processes:
                process.kill()
        return self._why

    def end(self, why: str = "") -> None:
        """Let all others end, once: by the next time this process may be in the group of other shards.

        Without a reason why they end, they are asked to.
        """
        if self._ended:
            return
        atexit.unregister(self.end)
        self._why = self._why or why
        self._ended = True  # before they can go
        for line in self.lines:
            if not self._why:
                with suppress(EngineError):  # it has gone already
                    line.send([[END]])
            line.close()
        until = time.monotonic() + LAST_S
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if dist.is_initialized():
            dist.destroy_process_group()  # which may wait for a device that has gone
        self._all_gone = True


def _start(bundle: Path, rank: int, device: str, compiled: bool, port: int, secret: str) -> "subprocess.Popen[bytes]":
    name = __name__.rpartition(".")[0] + ".follower"
    command = [sys.executable, "-m", name, str(bundle), "--rank", str(rank), "--device", device]
    return subprocess.Popen(
        [*command, *(["--compiled"] if compiled else [])],
        env=os.environ | {PORT: str(port), SECRET: secret},
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # signals of a terminal reach the first shard, which ends the others
    )


class Attending:
    """The way of another shard to the first one."""

    def __init__(self, group: Group, device: str) -> None:
        self._group, self._device = group, device
        if by_torchrun() is None:
            self._store: Store = TCPStore(LOOPBACK, int(os.environ[PORT]), timeout=LONGEST_WAIT)
        else:
            self._store = next(rendezvous("env://", timeout=LONGEST_WAIT))[0]
        host, port = self._store.get(ADDRESS).decode().split()
        secret = os.environ[SECRET].encode() if by_torchrun() is None else self._store.get(SECRET)
        self.line = Line(socket.create_connection((host, int(port)), LONGEST_WAIT.total_seconds()))
        self.line.say(secret)

    def ready(self) -> None:
        """Say that this shard is open, and join the others."""
        self.line.send([[READY]])
        _join(PrefixStore(PREFIX, self._store), self._group, self._device)
        self.line.wait_forever()

    def failed(self, why: str) -> None:
        """Say why this shard cannot be opened, and stay until it is heard: else it would have ended unexplained."""
        self.line.send([[FAILED, why]])
        with suppress(Closed):
            self.line.take(1)
