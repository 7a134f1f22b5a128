"""Who ended the shards: the same answer for whoever asks, also while they are being ended."""

import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from trt_spec.engines import EngineError
from trt_spec.engines.torch.parallel import meeting
from trt_spec.engines.torch.parallel.commands import Closed, Line
from trt_spec.engines.torch.parallel.meeting import GONE, Gathering

from ...kit.shards import gathered

LIVES = "exec sleep 600"
KILLED = -signal.SIGKILL
LEFT = f"exit {GONE}"  # by the others
DIES_IN_THE_DOOR = """
import os, signal
from trt_spec.engines.torch.parallel.meeting import Attending, Group
Attending(Group(1, 2), "cpu")
os.kill(os.getpid(), signal.SIGKILL)
"""
A_THREAD_IS_LATE = """
import sys, threading, time
import torch
import torch.distributed as dist
from trt_spec.engines import EngineError
from trt_spec.engines.torch.parallel import follower

def ends_while_a_thread_of_the_group_works(*_):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    works = threading.Event()
    def late(_):
        works.set()
        time.sleep(0.5)
    dist.broadcast(torch.zeros(1), 0, async_op=True).get_future().then(late)
    works.wait()
    if sys.argv[1]:
        raise EngineError(sys.argv[1])

follower._follow = ends_while_a_thread_of_the_group_works
follower.follow(None, 1, "cpu")
"""


class Held(subprocess.Popen[bytes]):
    """A process whose end somebody waits for until the test lets it go on."""

    def __init__(self, command: Sequence[str]) -> None:
        self.waits, self.goes_on = threading.Event(), threading.Event()
        super().__init__(command)

    def wait(self, timeout: float | None = None) -> int:
        self.waits.set()
        assert self.goes_on.wait(60)
        return super().wait(timeout)


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(does: str, kind: type[subprocess.Popen[bytes]] = subprocess.Popen) -> subprocess.Popen[bytes]:
        started.append(kind(["sh", "-c", does]))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.communicate()


@pytest.fixture
def line() -> Iterator[tuple[Line, socket.socket]]:
    """A line to another shard, and its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    yield Line(ours), theirs
    ours.close()
    theirs.close()


def test_named_is_the_shard_that_ended_by_itself_not_one_that_it_has_left(
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:
    left, lives, died = start(LEFT), start(LIVES), start("kill -9 $$")
    for one in (left, died):
        one.wait()
    assert gathered([left, lives, died]).who_ended() == f"shard 3 of the target has ended with status {KILLED}"
    assert gathered([lives, left]).who_ended() == f"shard 2 of the target has ended with status {GONE}"


def test_a_step_that_fails_after_the_others_were_killed_names_the_shard_that_died(
    start: Callable[..., subprocess.Popen[bytes]], line: tuple[Line, socket.socket]
) -> None:
    ours, theirs = line
    processes = [start(LIVES), start("kill -9 $$")]
    processes[1].wait()
    gathering = gathered(processes, [ours])
    assert gathering.gone() == ""
    theirs.close()
    asked = [gathering.gone()]
    assert processes[0].wait() == KILLED
    asked.append(gathering.who_ended())
    assert asked == [f"shard 2 of the target has ended with status {KILLED}"] * 2


@pytest.mark.parametrize("why", ["", "the shards no longer work together"])
def test_whoever_asks_while_the_others_are_being_ended_hears_what_ended_them(
    why: str, start: Callable[..., subprocess.Popen[bytes]], line: tuple[Line, socket.socket]
) -> None:
    """Where nothing has, they were told to end: nobody has gone, and nobody is killed."""
    ours, theirs = line
    ending, other = start(LIVES, Held), start(f"exit {GONE if why else 0}")
    assert isinstance(ending, Held)
    other.wait()
    gathering = gathered([ending, other], [ours])
    ends = threading.Thread(target=lambda: gathering.end(why) if why else gathering.end())
    ends.start()
    assert ending.waits.wait(60)
    assert gathering.gone() == why
    if why:
        assert subprocess.Popen.wait(ending) == KILLED
    else:
        assert ending.poll() is None
        assert theirs.recv(64)[8:] == b'[["end"]]'
        ending.kill()
    ending.goes_on.set()
    ends.join(60)
    assert gathering.gone() == "", "they have been ended"


def test_callers_are_let_in_without_a_wait_for_each_process(
    start: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many callers as processes, a wait for each would cost the square of their number."""
    secret, processes = b"s" * 8, [start(LIVES) for _ in range(2)]
    gathering = gathered(processes)
    with socket.create_server(("127.0.0.1", 0)) as server:
        callers = [socket.create_connection(server.getsockname()) for _ in processes]
        for caller in callers:
            caller.sendall(secret)
        monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it waits {seconds} s"))
        gathering._accept(server, secret, len(callers))
    assert len(gathering.lines) == 2
    for each in (*gathering.lines, *callers):
        each.close()


def test_a_line_that_another_thread_has_closed_is_gone(line: tuple[Line, socket.socket]) -> None:
    ours, _ = line
    assert not ours.gone
    ours.close()
    assert ours.gone
    with pytest.raises(Closed):
        ours.require()


@pytest.mark.exhaustive
def test_a_shard_that_dies_after_it_has_called_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*asked: object) -> subprocess.Popen[bytes]:
        port, secret = asked[-2:]
        found = {meeting.PORT: str(port), meeting.SECRET: str(secret)}
        return subprocess.Popen([meeting.sys.executable, "-c", DIES_IN_THE_DOOR], env=meeting.os.environ | found)

    monkeypatch.setattr(meeting, "_start", dies)
    with pytest.raises(EngineError, match=rf"did not meet \(shard 1 of the target has ended with status {KILLED}\)"):
        Gathering(tmp_path, ["cpu", "cpu"], compiled=False)


@pytest.mark.parametrize("why", ["", "the first has gone"])
def test_a_shard_ends_as_it_says_although_a_thread_of_the_group_works_still(why: str) -> None:
    """Python cannot end then: such a thread would abort the process."""
    ended = subprocess.run([sys.executable, "-c", A_THREAD_IS_LATE, why], stderr=subprocess.PIPE, text=True)
    assert ended.returncode == (GONE if why else 0), ended.stderr
    assert ended.stderr == (f"shard 1 of the target ends: {why}\n" if why else "")
