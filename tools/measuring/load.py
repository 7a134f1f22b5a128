"""Load a server as many clients do, and measure what each of them waits for.

Requests arrive at random times (Poisson), at most so many at once; each streams a completion of a prompt. With --check
every greedy text is compared with what the bundle writes alone, without speculation.

    python -m trt_spec.tools.measuring.load --url http://127.0.0.1:8000 --rate 4 --seconds 60
"""

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any
from urllib.parse import urlsplit

from ...engines import EngineError, RequestError
from ...runtime import Decoder, SamplingParams
from ..console import say
from ..drawable import require_drawable
from ..flags.controller import read_draft_length
from ..flags.sampling import add_number
from ..pages.charts import save, waits_under_load
from ..program import program
from ..prompts.shipped import KINDS, bench_prompts
from ..timing.time_rounds import percentiles
from ..whole_file import outputs

PERCENTILES = (50, 90, 99)


@dataclass
class ClientRequest:
    """One request as its client saw it; times are seconds since the load began."""

    prompt: int  # which of the prompts
    arrived: float
    status: int = 0  # of HTTP; 0: no answer
    error: str = ""
    token_ids: list[int] = field(default_factory=list)
    first: float = 0.0
    last: float = 0.0

    @property
    def whole(self) -> bool:
        return self.status == 200 and not self.error and bool(self.token_ids)

    @property
    def first_ms(self) -> float:
        return 1e3 * (self.first - self.arrived)

    @property
    def token_ms(self) -> float:
        """Milliseconds per token after the first."""
        return 1e3 * (self.last - self.first) / max(1, len(self.token_ids) - 1)


class Load:
    """Sends the requests of one run."""

    def __init__(self, arguments: argparse.Namespace, prompts: Sequence[Any]) -> None:
        parts = urlsplit(arguments.url)
        if parts.scheme != "http" or not parts.hostname:
            raise RequestError(f"--url is {arguments.url!r}, expected http://host:port")
        self._host, self._port = parts.hostname, parts.port or 80
        self._arguments, self._prompts = arguments, prompts
        self._began = 0.0

    async def run(self) -> list[ClientRequest]:
        """Let requests arrive for the given time, and wait for all answers."""
        choose, places = random.Random(self._arguments.seed), asyncio.Semaphore(self._arguments.clients)
        self._began, due = perf_counter(), 0.0
        under_way: list[asyncio.Task[ClientRequest]] = []
        while (due := due + choose.expovariate(self._arguments.rate)) < self._arguments.seconds:
            await asyncio.sleep(max(0.0, due - self._now()))
            one = ClientRequest(choose.randrange(len(self._prompts)), self._now())
            under_way.append(asyncio.create_task(self._ask(one, places)))
        return list(await asyncio.gather(*under_way))

    def _now(self) -> float:
        return perf_counter() - self._began

    async def _ask(self, one: ClientRequest, places: asyncio.Semaphore) -> ClientRequest:
        async with places:
            try:
                async with asyncio.timeout(self._arguments.patience):
                    await self._stream(one)
            except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
                one.error = f"{type(error).__name__}: {error}"
        return one

    async def _stream(self, one: ClientRequest) -> None:
        body = {
            "prompt": self._prompts[one.prompt],
            "max_tokens": self._arguments.max_tokens,
            "temperature": self._arguments.temperature,
            "stream": True,
            "return_token_ids": True,
        }
        if self._arguments.draft_length is not None:
            body["draft_length"] = self._arguments.draft_length
        content = json.dumps(body).encode()
        key = f"authorization: Bearer {self._arguments.api_key}\r\n" if self._arguments.api_key else ""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {self._host}\r\ncontent-type: application/json\r\n{key}"
            f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(head.encode() + content)
            await writer.drain()
            one.status = int((await reader.readline()).split()[1])
            while (await reader.readline()).strip():
                pass
            if one.status != 200:
                one.error = (await reader.read(2000)).decode(errors="replace")
                return
            async for event in events(reader):
                self._note(one, event)
        finally:
            writer.close()

    def _note(self, one: ClientRequest, event: dict[str, Any]) -> None:
        if "error" in event:
            one.error = event["error"]["message"]
        for choice in event.get("choices", ()):
            if ids := choice.get("token_ids"):
                one.last = self._now()
                one.first = one.first or one.last
                one.token_ids += ids


async def events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The events of a stream that comes in chunks, up to [DONE]."""
    rest = b""
    while size := int(await reader.readline() or b"0", 16):
        rest += await reader.readexactly(size)
        await reader.readline()
        *lines, rest = rest.split(b"\n\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])
            elif line == b"data: [DONE]":
                return
    raise ValueError("the stream ended before [DONE]")


def figures(asked: Sequence[ClientRequest], arguments: argparse.Namespace) -> dict[str, Any]:
    """Put into numbers what the clients saw."""
    whole = [one for one in asked if one.whole]
    if not whole:
        raise EngineError(f"no answer came whole; the first said: {asked[0].error if asked else 'nothing was asked'}")
    seconds = max(one.last for one in whole)
    good = [one for one in whole if one.first_ms <= arguments.first_ms and one.token_ms <= arguments.token_ms]
    tokens = sum(len(one.token_ids) for one in whole)
    return {
        "requests": len(asked),
        "whole": len(whole),
        "refused": dict(Counter(str(one.status) for one in asked if one.status not in (0, 200))),
        "errors": [one.error for one in asked if one.error and one.status in (0, 200)],
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "goodput": {
            "requests_per_second": len(good) / seconds,
            "within_first_ms": arguments.first_ms,
            "within_token_ms": arguments.token_ms,
        },
        "first_token_ms": percentiles([one.first_ms for one in whole], PERCENTILES),
        "per_token_ms": percentiles([one.token_ms for one in whole], PERCENTILES),
        "each": [[one.arrived, one.first_ms, one.token_ms] for one in whole],
    }


def wrong_texts(bundle: Path, asked: Sequence[ClientRequest], prompts: Sequence[Any], max_tokens: int) -> int:
    """Count the answers that differ from what the bundle writes alone without speculation."""
    with Decoder.open(bundle, max_batch=1) as decoder:
        params = SamplingParams(max_new_tokens=max_tokens)
        right = [decoder.generate([prompt], params, draft_length=0)[0].token_ids for prompt in prompts]
    return sum(tuple(one.token_ids) != right[one.prompt] for one in asked if one.whole)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    number = partial(add_number, parser, kind=_above_zero, letter="X")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default http://127.0.0.1:8000)")
    parser.add_argument("--api-key", metavar="KEY", help="what the server asks for")
    number("--rate", 2.0, "requests that arrive in a second, on average")
    number("--seconds", 60.0, "how long they arrive")
    number("--patience", 300.0, "seconds after which a client gives up")
    add_number(parser, "--clients", 64, "the most at once")
    parser.add_argument(
        "--prompts", default="python", metavar="KIND|F", help=f"{', '.join(KINDS[:-1])}, or a file (default python)"
    )
    add_number(parser, "--max-tokens", 64, "of each answer")
    add_number(parser, "--temperature", 0.0, "0 is greedy", float, letter="X")
    parser.add_argument(
        "--draft-length",
        type=read_draft_length,
        metavar="K",
        help="what each request asks for (default: the server's own)",
    )
    add_number(parser, "--seed", 0, "of the arrivals", int)
    number("--first-ms", 1000.0, "an answer is good if its first token comes by then")
    number("--token-ms", 100.0, "and the others so fast, each")
    parser.add_argument("--check", type=Path, metavar="B", help="compare greedy texts with those of this bundle alone")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file as well")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw what each waited for, into a .png or .svg")


def run(arguments: argparse.Namespace) -> int:
    if arguments.plot:
        require_drawable(arguments.plot)
    if arguments.check and arguments.temperature:
        raise RequestError(f"--check compares greedy texts, --temperature is {arguments.temperature:g}; use 0")
    if arguments.prompts == "random":
        raise RequestError("--prompts is random, but the server's vocabulary is not known; name texts")
    prompts = bench_prompts(arguments.prompts, 0)
    load = Load(arguments, prompts)
    with outputs(arguments, "json", "plot") as out:
        title = f"{arguments.rate:g} requests a second for {arguments.seconds:g} s at {arguments.url}"
        say(title)
        began = thread_time(), perf_counter()
        asked = asyncio.run(load.run())
        own, elapsed = thread_time() - began[0], perf_counter() - began[1]
        found = figures(asked, arguments) | {"own_cores": own / elapsed}  # a server on this machine lacks so much
        if arguments.check:
            found["wrong"] = wrong_texts(arguments.check, asked, prompts, arguments.max_tokens)
        if "json" in out:
            print(json.dumps(found), file=out["json"])
        if "plot" in out:
            save(waits_under_load(found), ["What clients waited for", title], arguments.plot, out["plot"])
    print(json.dumps({name: value for name, value in found.items() if name != "each"}))
    return 1 if found["errors"] or found.get("wrong") else 0


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:20]!r}, expected a number above 0")
    return value


main = program("load", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
