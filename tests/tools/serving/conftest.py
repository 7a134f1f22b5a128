"""One server for all tests of this folder: the tiny pair behind a real socket, as `trt-spec serve` runs it."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ssl import SSLContext
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest
from trt_spec.runtime import Decoder
from trt_spec.runtime.round import round as round_
from trt_spec.tools.serving.allowances import Allowances
from trt_spec.tools.serving.app import make_app
from trt_spec.tools.serving.keys import Keys
from trt_spec.tools.serving.listening import address, listen
from trt_spec.tools.serving.server import run_loop, serve_until
from trt_spec.tools.serving.service import Service, open_service

from ...kit.bundles import Pair, tiny_pair
from ...kit.models import tiny_llama

if TYPE_CHECKING:
    from trt_spec.tools.serving.tracing import Traces

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}0{{ m.content }}1{% endfor %}a0"


class Served:
    """A server, its address, and the service behind it."""

    def __init__(self, service: Service, url: str) -> None:
        self.service, self.url = service, url
        self.decoder = service.decoder
        self.http = httpx.Client(base_url=url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)

    def post(self, path: str, body: object) -> httpx.Response:
        return self.http.post(path, json=body)


@contextmanager
def serving(
    pair: Pair,
    *,
    keys: Sequence[str] = (),
    max_batch: int = 4,
    max_waiting: int = 64,
    template: str | None = TEMPLATE,
    names: Sequence[str] = ("tiny",),
    reasoning: str | None = None,
    origins: Sequence[str] = (),
    drain_seconds: float = 5,
    log_prompts: bool = False,
    prefix_bytes: int | None = None,
    drafter: str | None = None,
    tls: SSLContext | None = None,
    allowances: Allowances | None = None,
    traces: "Traces | None" = None,
    **more: Any,
) -> Iterator[Served]:
    """Serve a pair from a thread of its own until the block ends."""
    started, ends = threading.Event(), []
    with (
        Decoder.open(pair.bundle, max_batch=max_batch, prefix_bytes=prefix_bytes) as decoder,
        listen("127.0.0.1", 0) as listener,
    ):
        service = open_service(decoder, max_waiting, names, template, reasoning, drafter=drafter, traces=traces, **more)
        app = make_app(service, Keys(keys), log_prompts, origins, allowances)

        async def run() -> None:
            end, end_now = asyncio.Event(), asyncio.Event()
            ends.extend([asyncio.get_running_loop(), end])
            started.set()
            await serve_until(end, end_now, app, service, listener, drain_seconds, tls)

        thread = threading.Thread(target=lambda: run_loop(run()))
        thread.start()
        started.wait()
        served = Served(service, address(listener, tls))
        served.end = lambda: ends[0].call_soon_threadsafe(ends[1].set)
        try:
            yield served
        finally:
            served.http.close()
            served.openai.close()
            if thread.is_alive():
                served.end()
            thread.join()


@pytest.fixture(scope="session")
def served(llama: Pair) -> Iterator[Served]:
    with serving(llama) as server:
        yield server


@pytest.fixture(scope="session")
def alone(llama: Pair) -> Iterator[Decoder]:
    """What the same bundle says without a server."""
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        yield decoder


class Gate:
    """Holds rounds: each needs a permit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._permits, accept = threading.Semaphore(0), round_.accept
        self.fails = False

        def held(*arguments: object) -> None:
            self._permits.acquire()
            if self.fails:
                raise RuntimeError("the engine failed")
            accept(*arguments)

        monkeypatch.setattr(round_, "accept", held)

    def let(self, rounds: int) -> None:
        self._permits.release(rounds)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch):
    gate = Gate(monkeypatch)
    yield gate
    gate.let(10_000)


@pytest.fixture(scope="session")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair whose vocabulary has braces and quotes."""
    return tiny_pair(tiny_llama, tmp_path_factory.mktemp("signs"), noise=0.05, vocab=300)


@pytest.fixture(scope="module")
def server(signs: Pair) -> Iterator[Served]:
    with serving(signs, prefix_bytes=2**22) as server:
        yield server
