"""Whatever clients do, the server goes on, leaks no row and no memory of a cache, and others get their own text."""

import asyncio
import random
from contextlib import suppress

import httpx
import pytest
from trt_spec.runtime import Decoder, SamplingParams

from ...kit.bundles import Pair
from ...kit.waiting import until
from .conftest import Served, serving

BODY = {"temperature": 0, "ignore_eos": True, "max_tokens": 60}
TRUTHS = {prompt: SamplingParams(max_new_tokens=60, ignore_eos=True) for prompt in ("abc", "xyz", "def f", "q")}


async def stays(client: httpx.AsyncClient, prompt: str) -> str:
    """Ask until there is a place; the answer is to be the truth."""
    while True:
        response = await client.post("/v1/completions", json=BODY | {"prompt": prompt})
        if response.status_code != 503:
            return response.json()["choices"][0]["text"]
        await asyncio.sleep(0.01)


async def leaves(client: httpx.AsyncClient, prompt: str, stream: bool) -> None:
    """Go away in the middle of a stream, or before a whole answer is there."""
    if stream:
        async with client.stream("POST", "/v1/completions", json=BODY | {"prompt": prompt, "stream": True}) as response:
            async for _ in response.aiter_lines():
                return
    with suppress(httpx.ReadTimeout):
        await client.post("/v1/completions", json=BODY | {"prompt": prompt}, timeout=httpx.Timeout(300, read=0.05))


async def breaks(client: httpx.AsyncClient, random: random.Random) -> None:
    content = random.choice([b"{", b'{"prompt": 5}', b"\xff" * 100, b" " * 10_000_000, b'{"prompt": ' + b"[" * 9999])
    try:
        response = await client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert response.status_code in (400, 413)
    except httpx.TransportError:
        assert len(content) == 10_000_000, "the server need not read to the end what it has refused"


async def reads_slowly(url: str) -> None:
    """Ask for a stream and take a few bytes of it at a time."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=16)
    body = b'{"prompt": "abc", "stream": true, "max_tokens": 60, "n": 4}'
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    for _ in range(20):
        await reader.read(3)
        await asyncio.sleep(0.005)
    writer.close()


async def storm(url: str, connections: int) -> list[tuple[str, str]]:
    chance = random.Random(1)
    limits = httpx.Limits(max_connections=None)
    said: list[tuple[str, str]] = []

    async def one(number: int) -> None:
        prompt = chance.choice(list(TRUTHS))
        async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
            kind = number % 10
            if kind < 5:
                await leaves(client, prompt, stream=bool(number % 2))
            elif kind == 5:
                await breaks(client, chance)
            elif kind == 6:
                await reads_slowly(url)
            else:
                said.append((prompt, await stays(client, prompt)))

    await asyncio.gather(*map(one, range(connections)))
    return said


@pytest.mark.exhaustive
def test_after_a_storm_of_clients_nothing_is_in_use_and_every_answer_was_true(llama: Pair, alone: Decoder):
    expected = {prompt: alone.generate(prompt, params, draft_length=0)[0].text for prompt, params in TRUTHS.items()}
    with serving(llama, max_waiting=8) as server:
        said = asyncio.run(storm(server.url, 300))
        assert len(said) == 90
        assert [text for prompt, text in said] == [expected[prompt] for prompt, text in said]
        idle(server)


def idle(server: Served) -> None:
    """Nothing is live, waiting or in a cache, and the next client is served."""
    until(lambda: not server.service.stepper.tickets and not server.decoder.live)
    until(lambda: server.decoder.cache_usage == 0)
    assert server.post("/v1/completions", BODY | {"prompt": "abc"}).status_code == 200
    assert server.http.get("/health").status_code == 200


@pytest.mark.exhaustive
def test_two_thousand_idle_connections_keep_nobody_out(llama: Pair):
    async def connect(url: str) -> int:
        host, port = url.removeprefix("http://").split(":")
        opened = [await asyncio.open_connection(host, int(port)) for _ in range(2000)]
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            status = (await client.post("/v1/completions", json=BODY | {"prompt": "abc"})).status_code
        for _, writer in opened:
            writer.close()
        return status

    with serving(llama) as server:
        assert asyncio.run(connect(server.url)) == 200
