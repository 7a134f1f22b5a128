"""What `/metrics` says of memory is what the process takes, and long answers add nothing to it."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from ...kit.bundles import Pair
from .conftest import serving

POOL = re.compile(r'trt_spec:memory_bytes\{.*pool="(\w+)"\} (\S+)')
RESIDENT = re.compile(r"^process_resident_memory_bytes (\S+)", re.MULTILINE)
MOST_UNTOLD = 0.05  # of the process: what grows beside the pools, such as arenas of the engine


class Memory:
    """What `/metrics` says of a server."""

    def __init__(self, page: str) -> None:
        self.pools = {name: float(held) for name, held in POOL.findall(page)}
        self.resident = float(RESIDENT.search(page)[1])

    @property
    def untold(self) -> float:
        """What the process takes beside what the pools hold."""
        return self.resident - sum(self.pools.values())


def test_the_metrics_tell_what_each_pool_holds(llama: Pair):
    with serving(llama, prefix_bytes=2**20, max_batch=2) as server:
        decoder = server.decoder
        before = Memory(server.http.get("/metrics").text)
        server.post("/v1/completions", {"prompt": "abc", "n": 2, "max_tokens": 200, "ignore_eos": True})
        after = Memory(server.http.get("/metrics").text)
        caches = [model.cache for model in decoder.models.values()]
        each = sum(cache.contract.cache_bytes_per_token for cache in caches)
        assert set(before.pools) == {
            "weights",
            "caches",
            "prefixes",
            "adapters",
            "logits",
            "steps",
            "answers",
            "unused",
        }
        assert before.pools["steps"] == 0, "on a CPU"
        assert after.pools["caches"] == sum(each.nbytes for one in caches for each in one.buffers.values())
        assert before.pools["prefixes"] == 0
        assert after.pools["prefixes"] == 32 * each * decoder.prefixes.blocks / len(caches) > 0
        assert after.pools["logits"] > before.pools["logits"]
        decoder.forget_outputs()
        assert Memory(server.http.get("/metrics").text).pools["prefixes"] == 0


@contextmanager
def started(pair: Pair, *flags: str) -> Iterator[str]:
    """A pair, served by a process of its own."""
    command = [sys.executable, "-m", "trt_spec.tools.cli", "serve", "--bundle", str(pair.bundle), "--port", "0", *flags]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield next(found[0] for line in process.stderr if (found := re.search(r"http://\S+", line)))
        finally:
            process.kill()


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_hundred_rounds_of_long_answers_take_no_more_memory_than_twenty(demo: Pair):
    flags = ("--prefix-memory", "32MiB", "--log-level", "error")
    with started(demo, *flags) as url, httpx.Client(timeout=600) as client:
        at = {}
        for number in range(101):
            if number in (1, 20, 100):
                at[number] = Memory(client.get(f"{url}/metrics").text)
            body = {"n": 8, "max_tokens": 60 + 60 * (number % 3), "ignore_eos": True, "prompt": f"def f{number}("}
            assert client.post(f"{url}/v1/completions", json=body).status_code == 200
    assert abs(at[100].resident - at[20].resident) < 0.05 * at[20].resident
    assert at[100].pools["prefixes"] > 0.9 * 2**25, "what is kept has filled its room"
    for one in (at[20], at[100]):
        assert abs(one.untold - at[1].untold) < MOST_UNTOLD * one.resident, "the pools tell what has grown"
