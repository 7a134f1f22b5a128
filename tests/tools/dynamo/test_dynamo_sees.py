"""A worker of NVIDIA Dynamo says of images what the library says, as the engine alone and behind a frontend."""

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from trt_spec.export import export_bundle
from trt_spec.runtime import Decoder, Output, SamplingParams
from trt_spec.runtime.images.opening import MOST_IMAGES
from trt_spec.tools.serving import images as serving_images

from ...kit.bundles import Pair
from ...kit.images import data_url, image_file
from ...kit.seeing_models import PLACEHOLDER, Seeing, seeing
from .cluster import Cluster, worker_of

pytestmark = pytest.mark.replicas

FIRST, SECOND, THIRD = image_file(90, 61), image_file(45, 99, "L", "JPEG"), image_file(90, 61, "L")
GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 0.75, "seed": 7}
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{% if m.content is string %}{{ m.content }}{% else %}{% for part in "
    "m.content %}{% if part.type == 'image' %}PLACE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %};"
    "{% endfor %}a:"
)


def told(decoder: Decoder, prompt: str, urls: list[str], most: int = 20, **sampling: Any) -> dict[str, Any]:
    """Return a request as the frontend sends it."""
    return {
        "token_ids": decoder.tokenizer.encode(prompt).ids,
        "multi_modal_data": {"image_url": [{"Url": url} for url in urls]},
        "extra_args": {"formatted_prompt": prompt},
        "stop_conditions": {"max_tokens": most, "ignore_eos": True},
        "sampling_options": GREEDY | sampling,
    }


def alone(decoder: Decoder, prompt: str, images: list[bytes], most: int = 20, **sampling: Any) -> Output:
    params = SamplingParams(max_new_tokens=most, ignore_eos=True, **{"rule": "coupled", **GREEDY, **sampling})
    return decoder.generate(prompt, params, images=[images])[0]


async def said(engine: Any, request: dict[str, Any], context: Any) -> tuple[list[int], dict[str, Any]]:
    chunks = [chunk async for chunk in engine.generate(request, context)]
    return [token for chunk in chunks for token in chunk["token_ids"]], chunks[-1]


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "gemma3"])
def test_a_request_with_images_says_what_the_library_says_also_after_a_move(
    seeing_of: Callable[[str], Seeing], made, kind: str
):
    one = seeing_of(kind)
    prompt, urls = f"u:{one.placeholder}\n\nor{one.placeholder}? {'x' * 50}", [data_url(FIRST), data_url(SECOND)]

    async def ask(decoder: Decoder) -> None:
        engine, Context = made(decoder, "--rule", "coupled")
        await engine.start(1)
        for sampling in (GREEDY, SAMPLED):
            expected = alone(decoder, prompt, [FIRST, SECOND], **sampling)
            assert one.image_token not in expected.token_ids[:8], "which would be another image's place"
            request = told(decoder, prompt, urls, **sampling)
            tokens, last = await said(engine, request, Context("a"))
            assert (tuple(tokens), last["finish_reason"]) == (expected.token_ids, "length")
            usage = last["completion_usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] > 0, "the library has asked the same before"
            counts = expected.usage.prompt_tokens, 20
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (*counts, sum(counts))
            request["token_ids"] += tokens[:8]
            request["stop_conditions"]["max_tokens"] -= 8
            rest, last = await said(engine, request, Context("a"))
            assert tokens[:8] + rest == tokens
            assert {**last["completion_usage"], "prompt_tokens_details": None} == usage | {
                "prompt_tokens_details": None
            }
        other = told(decoder, prompt, urls[::-1])
        assert (await said(engine, other, Context("b")))[0] == [*alone(decoder, prompt, [SECOND, FIRST]).token_ids]
        await engine.cleanup()

    with Decoder.open(one.bundle, prefix_bytes=1 << 24) as decoder:
        asyncio.run(ask(decoder))


def test_what_cannot_be_seen_is_one_sentence(llava: Seeing, made, monkeypatch: pytest.MonkeyPatch):
    from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

    url, place = data_url(FIRST), llava.placeholder

    async def refuse(decoder: Decoder) -> None:
        engine, Context = made(decoder)
        await engine.start(1)
        for prompt, urls, sentence in (
            ("abc", [url], "the prompt has 0 places for 1 image"),
            (place * 2, [url], "the prompt has 2 places for 1 image"),
            (place, ["https://a.example/b.png"], "images from a.example are not fetched here"),
            (place, ["data:image/png;base64,AAAA"], "an image cannot be read"),
            (place, [url] * (MOST_IMAGES + 1), "there are 33 images, expected at most 32"),
        ):
            with pytest.raises(InvalidArgument, match=sentence):
                await said(engine, told(decoder, prompt, urls), Context("a"))
        with pytest.raises(InvalidArgument, match="n is refused"):
            await said(engine, told(decoder, place, ["data:broken"], n=2), Context("a"))
        monkeypatch.setattr(serving_images, "MOST_HELD_BYTES", -1)
        with pytest.raises(EngineShutdown, match="holds as many images as it may"):
            await said(engine, told(decoder, place, [url]), Context("a"))
        await engine.cleanup()

    with Decoder.open(llava.bundle) as decoder:
        asyncio.run(refuse(decoder))


def test_a_model_that_reads_text_alone_takes_no_images(llama: Pair, made):
    from dynamo.llm.exceptions import InvalidArgument

    async def refuse(decoder: Decoder) -> None:
        engine, Context = made(decoder)
        await engine.start(1)
        with pytest.raises(InvalidArgument, match="the model reads text alone; leave images out of the content"):
            await said(engine, told(decoder, "abc", [data_url(FIRST)]), Context("a"))
        await engine.cleanup()

    with Decoder.open(llama.bundle) as decoder:
        asyncio.run(refuse(decoder))


@pytest.fixture
def site(tmp_path: Path) -> Iterator[str]:
    """A host with an image."""
    (tmp_path / "image.png").write_bytes(FIRST)
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


def test_images_are_fetched_from_named_hosts_and_a_client_that_leaves_meanwhile_takes_no_row(
    llava: Seeing,
    made,
    site: str,
    monkeypatch: pytest.MonkeyPatch,
):
    from trt_spec.tools.serving.stepper import Stepper

    prompt, url = f"u:{llava.placeholder}", f"http://{site}/image.png"
    submitted: list[object] = []
    submit = Stepper.submit

    def counting(self: Stepper, wanted: Any, every_round: bool, **more: bool) -> Any:
        submitted.append(wanted)
        return submit(self, wanted, every_round, **more)

    monkeypatch.setattr(Stepper, "submit", counting)

    async def ask(decoder: Decoder) -> None:
        engine, Context = made(decoder, "--image-hosts", site)
        await engine.start(1)
        tokens, _ = await said(engine, told(decoder, prompt, [url]), Context("a"))
        assert tuple(tokens) == alone(decoder, prompt, [FIRST]).token_ids
        assert len(submitted) == 1
        gone = Context("b")
        gone.stop_generating()
        tokens, last = await said(engine, told(decoder, prompt, [url]), gone)
        assert (tokens, last["finish_reason"], len(submitted)) == ([], "cancelled", 1)
        await engine.cleanup()

    with Decoder.open(llava.bundle) as decoder:
        asyncio.run(ask(decoder))


class Eyes(Cluster):
    """Two workers of a tiny random model that sees, with a chat template."""

    def __init__(self, kind: str, home: Path, packages: Path) -> None:
        whole, place = home / "whole", PLACEHOLDER[kind]
        seeing(kind, whole)
        settings = whole / "tokenizer_config.json"
        known = json.loads(settings.read_text()) | {"chat_template": TEMPLATE.replace("PLACE", place)}
        settings.write_text(json.dumps(known))
        export_bundle(whole, home / "bundle", whole, images=True)
        self.placeholder, self.bundle = place, home / "bundle"
        super().__init__(home, packages, self.bundle)

    def workers(self) -> set[int]:
        try:
            return {worker_of(self.see([], "abc", max_tokens=1)) for _ in range(4)}
        except httpx.HTTPError:
            return set()

    def see(self, images: list[bytes], text: str, **fields: object) -> dict[str, Any]:
        answer = httpx.post(f"{self.url}/v1/chat/completions", json=chat(images, text) | fields, timeout=60)
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found


def chat(images: list[bytes], text: str) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(one)}} for one in images]
    told = {"extra_fields": ["worker_id", "timing"]}
    message = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return {
        "model": "eyes",
        "messages": [message],
        "max_tokens": 20,
        "temperature": 0,
        "ignore_eos": True,
        "nvext": told,
    }


@pytest.fixture(params=["llava", "qwen2_5_vl"])
def eyes(request: pytest.FixtureRequest, packages: Path, tmp_path: Path) -> Iterator[Eyes]:
    cluster = Eyes(request.param, tmp_path, packages)
    try:
        cluster.start_frontend()
        for name in ("first", "second"):
            cluster.start_worker(name, "--rule", "coupled", "--served-model-name", "eyes")
        cluster.wait_for_workers(2)
        yield cluster
    finally:
        cluster.kill()


def test_chats_go_where_their_images_are_kept_and_move_when_a_worker_dies(eyes: Eyes):
    """With the texts and the usage of the library."""
    text = "compare" * 8

    def hit(answer: dict[str, Any]) -> float:
        return float(answer["nvext"]["timing"]["kv_hit_rate"])

    first = {name: eyes.see(images, text) for name, images in (("one", [FIRST, SECOND]), ("two", [THIRD, SECOND]))}
    assert [hit(answer) for answer in first.values()] == [0, 0], "their tokens are the same, their images are not"
    for images, answer in zip(([FIRST, SECOND], [THIRD, SECOND]), first.values(), strict=True):
        eyes.until(lambda images=images: hit(eyes.see(images, text)) > 0.5)
        assert worker_of(eyes.see(images, text)) == worker_of(answer)
    streams = asyncio.run(moved(eyes))
    assert eyes.metric("model_migration_total") >= 1
    with Decoder.open(eyes.bundle) as decoder:
        for (images, asked, sampling), (content, usage) in streams:
            prompt = f"u:{eyes.placeholder * len(images)}{asked};a:"
            output = alone(decoder, prompt, images, most=MOST, **sampling)
            assert content == output.text
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (output.usage.prompt_tokens, MOST)


MOST = 400


async def moved(eyes: Eyes) -> list[Any]:
    """Ask for long texts, kill a worker in their midst, and return what came."""
    wanted = [([FIRST, SECOND][: 1 + n % 2], f"number {n}", (GREEDY, SAMPLED)[n % 2]) for n in range(8)]
    begun = [0] * len(wanted)

    async def read(n: int, client: httpx.AsyncClient) -> tuple[str, dict[str, int]]:
        images, text, sampling = wanted[n]
        stream = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": MOST}
        content, usage = "", {}
        async with client.stream("POST", "/v1/chat/completions", json=chat(images, text) | stream | sampling) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    usage = chunk.get("usage") or usage
                    content += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                    begun[n] += 1
        return content, usage

    async with httpx.AsyncClient(base_url=eyes.url, timeout=120) as client:
        reading = [asyncio.create_task(read(n, client)) for n in range(len(wanted))]
        while min(begun) < 3:
            await asyncio.sleep(0.005)
        eyes.processes[-1].send_signal(signal.SIGKILL)
        return list(zip(wanted, await asyncio.gather(*reading), strict=True))
