"""NVIDIA Dynamo before two workers: its own frontend, from the package index, in a folder of its own."""

import asyncio
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from trt_spec.engines import BLOCK_TOKENS
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.prefixes import Block
from trt_spec.runtime.memory.snapshots import EVERY
from trt_spec.tools.dynamo.events import Hashes, tokens_of
from trt_spec.tools.dynamo.requests import seed_of
from trt_spec.tools.dynamo.worker import main
from trt_spec.tools.serving import stepper
from trt_spec.tools.serving.stepper import BROKEN, Stepper
from trt_spec.tools.serving.tickets import RequestGroup

from ...kit.bundles import Pair
from ...kit.hybrids import Hybrid
from ...kit.prompts import random_prompts
from ...kit.shards import in_shards, shards_of
from ...runtime.scripted import encoded, says, scripted_decoder
from ..serving.manifests import commands_of
from .cluster import MODEL, Cluster, body_of, worker_of

pytestmark = pytest.mark.replicas


@pytest.fixture
def start(packages: Path, demo: Pair, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """`start(…)` starts a frontend and two workers with these flags."""
    with ExitStack() as running:

        def start(*flags: object) -> Cluster:
            cluster = Cluster(tmp_path, packages, demo.bundle)
            running.callback(cluster.kill)
            cluster.start_frontend()
            for name in ("first", "second"):
                cluster.start_worker(name, "--rule", "coupled", *flags)
            cluster.wait_for_workers(2)
            return cluster

        yield start


STREAMS = 30
SETTINGS: list[dict[str, Any]] = [  # with numbers that are the same in the 32 bits in which Dynamo sends them
    {"temperature": 0},
    {"temperature": 0.75, "seed": 7},
    {"temperature": 1.0, "min_p": 0.125, "repetition_penalty": 1.25},
    {"temperature": 0, "stop": ["return", "):\n        s"], "min_tokens": 9},
    {"temperature": 0.75, "top_k": 40, "top_p": 0.75, "seed": -3},
]
NAMES = ("read", "config", "parse", "node", "tree", "count", "merge", "score", "split", "path")


def prompt_of(number: int) -> str:
    choose = random.Random(number)
    words = [choose.choice(NAMES) for _ in range(choose.choice([1, 3, 60]))]
    return f"{' = '.join(words)}\n\ndef {choose.choice(NAMES)}_{number}("


class Stream:
    """What one client is told."""

    def __init__(self, number: int) -> None:
        self.prompt, self.settings = prompt_of(number), SETTINGS[number % len(SETTINGS)]
        self.request_id, self.text, self.end = "", "", None
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.usage: dict[str, int] = {}

    async def read(self, client: httpx.AsyncClient) -> None:
        more = {"max_tokens": 160, "ignore_eos": True, "logprobs": 0, "return_tokens_as_token_ids": True}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        body = body_of(self.prompt, more | stream | self.settings)
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self.take(json.loads(line.removeprefix("data: ")))

    def take(self, chunk: dict[str, Any]) -> None:
        assert "error" not in chunk, chunk
        self.request_id = chunk["id"].removeprefix("cmpl-")
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.text += choice["text"]
            self.end = choice.get("finish_reason") or self.end
            if logprobs := choice.get("logprobs"):
                self.tokens += [int(token.removeprefix("token_id:")) for token in logprobs["tokens"]]
                self.logprobs += logprobs["token_logprobs"]

    @property
    def params(self) -> SamplingParams:
        seed = self.settings.get("seed", seed_of(self.request_id)) % 2**64
        given = self.settings | {"seed": seed, "rule": "coupled", "max_new_tokens": 160, "ignore_eos": True}
        return SamplingParams(**given, logprobs=0)


@pytest.mark.parametrize(
    ("end", "moves", "flags"),
    [
        (signal.SIGKILL, True, ()),
        (signal.SIGTERM, True, ("--drain-seconds", 0)),
        (signal.SIGTERM, False, ("--drain-seconds", 300)),
    ],
    ids=["killed", "told to end at once", "told to finish"],
)
def test_a_worker_that_ends_in_mid_stream_costs_no_token(
    start: Callable[..., Cluster], demo: Pair, end: signal.Signals, moves: bool, flags: Sequence[object]
):
    """Greedily and under rule coupled each text is the one that the library says alone, its usage and log-probs too."""
    cluster = start(*flags)
    streams = [Stream(number) for number in range(STREAMS)]

    async def read_all() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120, limits=httpx.Limits()) as client:
            reading = [asyncio.create_task(stream.read(client)) for stream in streams]
            while sum(len(stream.tokens) > 5 for stream in streams) < STREAMS * 2 // 3:  # so both are at work
                await asyncio.sleep(0.01)
            cluster.processes[-1].send_signal(end)
            await asyncio.gather(*reading)

    asyncio.run(read_all())
    assert (cluster.metric("model_migration_total") >= 5) == moves
    assert cluster.processes[-1].wait(60) == (-signal.SIGKILL if end == signal.SIGKILL else 0)
    with Decoder.open(demo.bundle) as decoder:
        expected = decoder.generate([stream.prompt for stream in streams], [stream.params for stream in streams])
    for stream, output in zip(streams, expected, strict=True):
        assert stream.text == output.text
        assert (stream.end, stream.usage["completion_tokens"]) == (output.finish_reason, len(output.token_ids))
        assert stream.usage["prompt_tokens"] == output.usage.prompt_tokens
        if "stop" not in stream.settings:
            assert tuple(stream.tokens) == output.token_ids
            assert stream.logprobs == pytest.approx([one.logprob for one in output.logprobs], abs=1e-3)


def test_a_worker_whose_shard_dies_costs_no_token_and_ends(packages: Path, demo: Pair, tmp_path: Path):
    """Each of both has its target in two shards."""
    for shards in (1, 2):
        in_shards(demo.bundle, tmp_path / str(shards), shards)
    cluster, streams = Cluster(tmp_path, packages, tmp_path / "2"), [Stream(number) for number in range(4)]

    async def read_all() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            reading = [asyncio.create_task(stream.read(client)) for stream in streams]
            while any(len(stream.tokens) <= 5 for stream in streams):
                await asyncio.sleep(0.01)
            [shard] = shards_of(cluster.processes[-1].pid)
            os.kill(shard, signal.SIGKILL)
            await asyncio.gather(*reading)

    try:
        cluster.start_frontend()
        for name in ("first", "second"):
            cluster.start_worker(name, "--rule", "coupled", "--engine", "torch")
        cluster.wait_for_workers(2)
        asyncio.run(read_all())
        assert cluster.metric("model_migration_total") >= 1
        assert cluster.processes[-1].wait(60) == BROKEN
    finally:
        cluster.kill()
    with Decoder.open(tmp_path / "1", "torch") as decoder:
        expected = decoder.generate([stream.prompt for stream in streams], [stream.params for stream in streams])
    assert [stream.text for stream in streams] == [output.text for output in expected]


@pytest.fixture(scope="module")
def cluster(packages: Path, demo: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One for all tests that end no worker; the second worker answers at a port of its own, too."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"), packages, demo.bundle)
    try:
        cluster.start_frontend()
        cluster.start_worker("first")
        cluster.start_worker("second", DYN_SYSTEM_PORT=str(cluster.port), DYN_HEALTH_CHECK_ENABLED="true")
        cluster.wait_for_workers(2)
        yield cluster
    finally:
        cluster.kill()


def test_a_prompt_goes_to_the_worker_that_keeps_its_beginning(cluster: Cluster):
    fields = {"max_tokens": 2, "nvext": {"extra_fields": ["worker_id", "timing"]}}
    prompts = [" + ".join(NAMES[number:] * 12) for number in range(6)]
    first = [cluster.ask(prompt, **fields) for prompt in prompts]
    assert {answer["nvext"]["timing"]["kv_hit_rate"] for answer in first} == {0.0}
    assert len(set(map(worker_of, first))) == 2
    cluster.until(lambda: all(hit_rate(cluster.ask(f"{prompt} - 1", **fields)) > 0.5 for prompt in prompts))
    again = [cluster.ask(f"{prompt} - count(node)", **fields) for prompt in prompts]
    assert list(map(worker_of, again)) == list(map(worker_of, first))


def hit_rate(answer: dict[str, Any]) -> float:
    return float(answer["nvext"]["timing"]["kv_hit_rate"])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"presence_penalty": 0.5}, "presence_penalty is refused: a request that moves to another worker does not say"),
        ({"n": 2, "temperature": 0.5}, "n is refused: send a request for each completion"),
        ({"max_tokens": 2000}, "max_new_tokens 2000 exceed the bundle's limit of 1024"),
    ],
)
def test_clients_are_told_what_is_refused(cluster: Cluster, fields: dict[str, object], said: str):
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body_of("abc", fields), timeout=60)
    assert answer.status_code == 400
    assert said in answer.json()["message"]


def test_a_chat_is_asked_by_the_template_of_the_bundle(cluster: Cluster, demo: Pair):
    message = {"role": "user", "content": "Read a file."}
    body = {"model": MODEL, "messages": [message], "max_tokens": 20, "temperature": 0}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60).json()
    with Decoder.open(demo.bundle) as decoder:
        [expected] = decoder.generate("# Read a file.\n", SamplingParams(max_new_tokens=20))
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 20, "total_tokens": 27}


def test_a_worker_says_that_it_is_in_good_health(cluster: Cluster):
    answer = httpx.get(f"http://127.0.0.1:{cluster.port}/health")
    assert (answer.status_code, answer.json()["endpoints"]["generate"]) == (200, "ready")


def test_no_worker_with_another_rule_is_let_in(cluster: Cluster):
    """Its texts could not go on as they would have."""
    cluster.start_worker("third", "--rule", "coupled")
    cluster.until(lambda: "Rejected incompatible workers" in cluster.log("frontend"))
    assert len(cluster.workers() | cluster.workers()) <= 2


def test_the_frontend_has_the_flags_that_the_manifests_give_it(cluster: Cluster):
    known = subprocess.run(
        [sys.executable, "-m", "dynamo.frontend", "--help"],
        env=cluster.environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    given = {word for words in commands_of("dynamo.frontend") for word in words if word.startswith("--")}
    assert "--migration-limit" in given
    assert [flag for flag in given if f"{flag} " not in known] == []


@pytest.mark.parametrize("stop", [True, False])
def test_a_client_that_leaves_frees_its_row(llama: Pair, made, stop: bool):
    """Whether Dynamo aborts the request or just reads no more."""

    async def leave(decoder: Decoder) -> None:
        engine, Context = made(decoder)
        await engine.start(1)
        ours, other = Context("a"), Context("a")
        limits = {"max_tokens": 200, "ignore_eos": True}
        going = engine.generate({"token_ids": [5, 6, 7], "stop_conditions": limits}, ours)
        staying = engine.generate({"token_ids": [5, 6, 7], "stop_conditions": limits}, other)
        await anext(staying)
        await anext(going)
        if stop:
            ours.stop_generating()
            await engine.abort(ours)
            assert [chunk async for chunk in going][-1]["finish_reason"] == "cancelled"
        else:
            await going.aclose()
        said = [token async for chunk in staying for token in chunk["token_ids"]]
        assert len(said) > 150
        await engine.cleanup()

    with Decoder.open(llama.bundle) as decoder:
        asyncio.run(leave(decoder))
        assert decoder.speculation.tokens < 400


def test_a_recurrent_model_says_what_it_says_alone_and_tells_of_no_block_that_a_hit_could_not_use(
    hybrids: Callable[[str], Hybrid], made
):
    """Several at once, and again when their beginnings are kept; those end where states were copied."""
    bundle, known = hybrids("lfm2").bundle, set[int]()
    prompts = random_prompts(64, [150, 200, 300, 9], seed=7)

    class Publisher:
        def publish_stored(self, *, block_hashes: list[int], **_: object) -> None:
            known.update(block_hashes)

        def publish_removed(self, hashes: list[int]) -> None:
            known.difference_update(hashes)

    async def say(engine: Any, context: Any, prompt: list[int]) -> tuple[int, ...]:
        limits = {"max_tokens": 20, "ignore_eos": True}
        request = {"token_ids": prompt, "stop_conditions": limits, "sampling_options": {"temperature": 0.0}}
        return tuple([token async for chunk in engine.generate(request, context) for token in chunk["token_ids"]])

    async def ask(decoder: Decoder) -> list[list[tuple[int, ...]]]:
        engine, Context = made(decoder)
        engine._publish(Publisher())
        await engine.start(1)
        said = [
            await asyncio.gather(*(say(engine, Context(f"{time}{i}"), prompt) for i, prompt in enumerate(prompts)))
            for time in range(2)
        ]
        await engine.cleanup()
        return said

    with Decoder.open(bundle, max_batch=1) as decoder:
        params = SamplingParams(max_new_tokens=20, ignore_eos=True)
        alone = [decoder.generate([prompt], params, draft_length=0)[0].token_ids for prompt in prompts]
    with Decoder.open(bundle, max_batch=4, prefix_bytes=2**22) as decoder:
        assert asyncio.run(ask(decoder)) == [alone, alone]
        assert len(known) * BLOCK_TOKENS == (1 + 1 + 2) * EVERY, "each ends in a copy of states"
        assert decoder.prefixes.found_tokens == (0 + 1 + 2) * EVERY, "of the first too little is behind it"


def test_images_are_told_of_as_the_router_knows_them(packages: Path):
    """Dynamo puts the same numbers in the places of an image's tokens when it routes a request."""
    place = packages / "dynamo/common/multimodal/routing_utils.py"  # its package needs libraries that nothing else does
    spec = importlib.util.spec_from_file_location("routing_utils", place)
    assert spec is not None
    assert spec.loader is not None
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    digests = [sha256(name).hexdigest() for name in (b"one", b"other")]
    tokens = list(range(BLOCK_TOKENS))
    seen = [
        SimpleNamespace(mm_hash=digest, mm_position=SimpleNamespace(offset=offset, length=9))
        for digest, offset in zip(digests, (3, 20), strict=True)
    ]
    known = theirs.build_mm_routing_info_from_features(seen, tokens)
    ours = ["01" * 32, "02" * 32]
    marks = {offset + one: digest.encode() for digest, offset in zip(ours, (3, 20), strict=True) for one in range(9)}
    hashes = Hashes()
    hashes.note(ours, [int(digest[:16], 16) for digest in digests])
    assert tokens_of(Block(b"", None, tuple(tokens), "", marks), hashes) == known["routing_token_ids"]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_what_is_sent_ends_in_no_half_of_a_stop_string_or_letter(
    tmp_path: Path, made, monkeypatch: pytest.MonkeyPatch, rule: str
):
    """But under rejection, where another worker would draw again what was held back, and so make it rarer."""
    permits = threading.Semaphore(1)
    step, progress = Decoder.step, RequestGroup.progress

    def step_when_the_last_was_seen(self: Decoder) -> bool:
        if self.live or self._scheduler.seating.waiting:
            permits.acquire()
        return step(self)

    async def progress_and_permit(self: RequestGroup) -> Any:
        news = await progress(self)
        permits.release()
        return news

    monkeypatch.setattr(Decoder, "step", step_when_the_last_was_seen)
    monkeypatch.setattr(RequestGroup, "progress", progress_and_permit)

    async def chunks(decoder: Decoder) -> list[bytes]:
        engine, Context = made(decoder, "--rule", rule)
        await engine.start(1)
        stops = {"stop": ["STOP"], "max_tokens": 9}
        request = {"token_ids": encoded("ab"), "stop_conditions": stops, "sampling_options": {"temperature": 0.5}}
        said = [bytes(chunk["token_ids"]) async for chunk in engine.generate(request, Context("a"))]
        permits.release(1000)
        await engine.cleanup()
        return said

    with scripted_decoder(tmp_path, says(encoded("aSTx€bc"), 2), says(encoded("?" * 9), 2)) as decoder:
        said = asyncio.run(chunks(decoder))
    assert b"".join(said).decode() == "aSTx€bc"
    sent = [text.decode(errors="replace") for text in accumulate(said[:-1])]
    torn = [text for text in sent if text.endswith(("\ufffd", "S", "ST", "STO"))]
    assert len(torn) == (0 if rule == "coupled" else 4)


def test_a_worker_that_ends_without_its_stuck_thread_leaves_no_folder(
    packages: Path, llama: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(str(packages))
    from dynamo.common.backend import run as dynamo_run

    folders: list[Path] = []
    handler = signal.getsignal(signal.SIGTERM)

    def run(*_: object, **__: object) -> None:
        folders.append(Path.cwd())
        assert [folder.name for folder in folders[0].iterdir()] == ["card"]

    def leave(code: int) -> None:
        assert code == BROKEN
        folders.append(Path.cwd())
        raise KeyboardInterrupt

    monkeypatch.setattr(dynamo_run, "run", run)
    monkeypatch.setattr(Stepper, "alive", property(lambda _: True))
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(stepper.logging, "shutdown", lambda: None)
    try:
        main(["--bundle", str(llama.bundle)])
    finally:
        signal.signal(signal.SIGTERM, handler)
    temporary, last = folders
    assert not temporary.exists()
    assert last != temporary
