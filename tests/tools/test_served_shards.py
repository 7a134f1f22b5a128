"""A server with a target in shards answers as with a whole one; it drains with them, and ends if one dies."""

import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from trt_spec.tools.serving.stepper import BROKEN

from ..kit.bundles import Pair
from ..kit.shards import in_shards, shards_of

COMMAND = Path(sys.executable).with_name("trt-spec")
LONG = {"prompt": "abc", "max_tokens": 150, "temperature": 0, "ignore_eos": True}

pytestmark = pytest.mark.exhaustive


class Serving:
    """A server's process, its address, and the process of its second shard."""

    def __init__(self, bundle: Path, *flags: object) -> None:
        command = [COMMAND, "serve", bundle, "--engine", "torch", "--port", 0, "--max-batch", 3, *flags]
        self.process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        found = re.search(r"https?://\S+", line := self.process.stderr.readline())
        assert found, line
        self.url = found[0]
        self.shards = shards_of(self.process.pid)

    def post(self, **fields: object) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=LONG | fields, timeout=60)

    def text(self, **fields: object) -> str:
        return self.post(**fields).json()["choices"][0]["text"]

    @contextmanager
    def streaming(self) -> Iterator[Iterator[str]]:
        """Stream a text of which the first token has come."""
        with httpx.stream("POST", f"{self.url}/v1/completions", json=LONG | {"stream": True}, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            yield lines

    def log_when_ended(self) -> str:
        """Return what it has said when it has ended, which its shards have done, too."""
        _, said = self.process.communicate(timeout=60)
        for shard in self.shards:
            with suppress(ProcessLookupError), os.fdopen(os.pidfd_open(shard)) as ended:
                assert select.select([ended], [], [], 0)[0], "a shard is still there"
        return said


@pytest.fixture(scope="module")
def bundles(llama: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for shards in (1, 2):
        in_shards(llama.bundle, folder / str(shards), shards)
    return folder


@pytest.fixture
def start(bundles: Path) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(shards: int, *flags: object) -> Serving:
        started.append(Serving(bundles / str(shards), *flags))
        assert len(started[-1].shards) == shards - 1
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_texts_are_those_of_one_device_and_sigterm_finishes_what_runs(start: Callable[..., Serving]) -> None:
    """Sampled and greedy, together and streamed, with drafts of several lengths."""
    asked = [{"draft_length": length, "prompt": "ab" * (1 + length)} for length in range(4)]
    asked += [{"temperature": 1, "seed": 5, "draft_length": 3}, {"temperature": 1, "seed": 6, "drafter": "suffix"}]
    texts = []
    for shards in (1, 2):
        server = start(shards, "--tensor-parallel", shards)
        with ThreadPoolExecutor() as clients:
            texts.append(list(clients.map(lambda fields, server=server: server.text(**fields), asked)))
        assert httpx.get(f"{server.url}/ready").json()["status"] == "ready"
        with server.streaming() as lines:
            server.process.send_signal(signal.SIGTERM)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert "draining" in server.log_when_ended()
        assert server.process.returncode == 0
    assert texts[0] == texts[1]


def test_a_shard_that_is_killed_ends_all_requests_and_the_server(start: Callable[..., Serving]) -> None:
    server = start(2)
    died = "shard 1 of the target has ended with status -9"
    with ThreadPoolExecutor() as clients, server.streaming() as lines:
        others = [clients.submit(server.post, max_tokens=230) for _ in range(4)]  # more than rows
        next(lines)
        os.kill(server.shards[0], signal.SIGKILL)
        assert died in "".join(lines)
        assert [died in one.result().text for one in others] == [True] * 4
    said = server.log_when_ended()
    assert f"the decoder has failed ({died}; open the bundle again); start the server again" in said
    assert server.process.returncode == BROKEN


def test_a_server_without_requests_ends_with_its_shard(start: Callable[..., Serving]) -> None:
    server = start(2)
    assert server.text(max_tokens=3)
    os.kill(server.shards[0], signal.SIGKILL)
    assert "shard 1 of the target has ended with status -9" in server.log_when_ended()
    assert server.process.returncode == BROKEN
