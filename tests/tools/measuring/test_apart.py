"""A peer runs in another process, which keeps it open, gives its errors, and ends with it."""

import importlib
import os

import pytest
from trt_spec.engines import EngineError
from trt_spec.runtime import SamplingParams
from trt_spec.tools.measuring.apart import Apart
from trt_spec.tools.measuring.theirs import Theirs
from trt_spec.tools.measuring.time_rounds import Setting

PEER = '''
import os, signal
from trt_spec.engines import EngineError

class Echo:
    """Writes each prompt once more than in the turn before, and dies after the last that it may."""

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


def test_a_process_that_dies_is_said_so(echo):
    theirs = Theirs(Setting(0, "none"))
    message = "the process of Echo ended before it had answered, perhaps for want of memory"
    with Apart("Echo", echo, 1) as apart:
        measure(apart, theirs)
        with pytest.raises(EngineError, match=message):
            measure(apart, theirs)
