"""A peer runs in another process, which keeps it open, passes on its errors, and ends with this one."""

import importlib
import os
import signal
import subprocess
import sys

import pytest
from trt_spec.engines import EngineError
from trt_spec.runtime import SamplingParams
from trt_spec.tools.peers.apart import Apart
from trt_spec.tools.timing.theirs import Theirs
from trt_spec.tools.timing.time_rounds import Setting

PEER = '''
import os, signal
from trt_spec.engines import EngineError

class Echo:
    """Writes each prompt once more than in the turn before, and dies once it has had all its turns."""

    def __init__(self, most):
        if most < 1:
            raise EngineError("this peer writes a prompt once at least")
        self.most, self.turns = most, 0

    def measure(self, prompts, params, into):
        self.turns += 1
        if self.turns > self.most:
            os.kill(os.getpid(), signal.SIGKILL)
        if params[0].max_new_tokens == 1:
            raise EngineError("this peer writes two tokens at least")
        into.texts = [prompt * self.turns for prompt in prompts]
        into.tokens_per_second.append(float(self.turns))
        into.waits.add(2, 3.0, first=True)

    def runs_as(self):
        return {"process": os.getpid()}
'''


@pytest.fixture
def echo(tmp_path, monkeypatch):
    (tmp_path / "echo_peer.py").write_text(PEER)
    monkeypatch.syspath_prepend(tmp_path)  # which the other process is told, too
    return importlib.import_module("echo_peer").Echo


def measure(apart, into, new_tokens=4):
    apart.measure([[5, 6], [7]], [SamplingParams(max_new_tokens=new_tokens)] * 2, into)


def test_what_a_peer_measured_in_its_own_process_adds_up_here(echo):
    theirs = Theirs(Setting(0, "none"))
    with Apart("Echo", echo, 2) as apart:
        process = apart.runs_as()["process"]
        assert process != os.getpid()
        measure(apart, theirs)
        measure(apart, theirs)
        assert apart.runs_as() == {"process": process}
    assert theirs.texts == [[5, 6, 5, 6], [7, 7]]
    assert theirs.tokens_per_second == [1.0, 2.0]
    assert theirs.waits.first_token == [3.0, 3.0]
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_an_error_of_a_peer_is_raised_here_and_it_goes_on(echo):
    theirs = Theirs(Setting(0, "none"))
    with Apart("Echo", echo, 2) as apart:
        with pytest.raises(EngineError, match="this peer writes two tokens at least"):
            measure(apart, theirs, new_tokens=1)
        measure(apart, theirs)
    assert theirs.tokens_per_second == [2.0]
    with pytest.raises(EngineError, match="this peer writes a prompt once at least"):
        Apart("Echo", echo, 0)


def test_the_death_of_a_process_is_reported(echo):
    theirs = Theirs(Setting(0, "none"))
    message = "the process of Echo ended before it answered, perhaps for lack of memory; lower --batch if it is above"
    with Apart("Echo", echo, 1) as apart:
        measure(apart, theirs)
        with pytest.raises(EngineError, match=message):
            measure(apart, theirs)
    with Apart("Echo", echo, 1) as apart:
        os.kill(apart.runs_as()["process"], signal.SIGKILL)  # while it waits
        for _ in range(2):
            with pytest.raises(EngineError, match=message):
                measure(apart, theirs)


UNTIL_KILLED = """
import signal, sys
from trt_spec.tools.peers.apart import Apart
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
sys.path.insert(0, sys.argv[1])
from echo_peer import Echo
apart = Apart("Echo", Echo, 1)
print("open", flush=True)
sys.stdin.read()
"""


def test_the_process_ends_with_the_one_that_opened_it_however_that_ends(echo, tmp_path):
    for end in (signal.SIGKILL, signal.SIGINT):
        command = [sys.executable, "-c", UNTIL_KILLED, tmp_path]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, start_new_session=True, **pipes) as process:
            assert process.stdout.readline() == "open\n"
            if end == signal.SIGKILL:
                process.kill()
            else:
                os.killpg(process.pid, end)  # as a terminal does
            _, errors = process.communicate(timeout=60)  # the other process holds the pipes for as long as it lives
        assert errors.count("KeyboardInterrupt") == (end == signal.SIGINT), errors  # of this process alone
