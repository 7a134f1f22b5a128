"""The decoder as NVIDIA Dynamo runs it: it begins, answers, lets go of requests, and says what is in its cache."""

import argparse
import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import PushSource
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from ...engines import BLOCK_TOKENS, EngineEnded, RequestError
from ...runtime import Decoder, Piece
from ..serving.errors import ApiError
from ..serving.images import ImageLoader
from ..serving.stepper import Stepper
from ..serving.tickets import RequestGroup, Submission
from ..serving.tokens import Spelling
from .events import Hashes, Publishing
from .images import hashes_of, placed, urls_of
from .requests import chunk_of, submission_of, usage_of

MOST_WAITING = 10_000  # Dynamo hands over no more at once
LINGER_SECONDS = 5  # for a round to end
DEAD = "this worker's decoder has died; another one goes on"


class DynamoEngine(LLMEngine):  # type: ignore[misc]  # it has no types here
    """All methods are called by one event loop."""

    from_args = None  # worker.py reads the arguments

    def __init__(self, decoder: Decoder, card: Path, arguments: argparse.Namespace) -> None:
        """Serve a decoder; `card` is a folder with what the frontend reads of a checkpoint."""
        self._decoder, self._arguments = decoder, arguments
        self._images, self._hashes = ImageLoader.of(decoder, arguments.image_hosts), Hashes()
        self._spelling = Spelling(decoder.tokenizer, decoder.bundle.tokenizer_file)
        self.stepper = Stepper(decoder, MOST_WAITING, on_end=lambda ticket: None)
        self._under_way: dict[RequestGroup, Any] = {}  # with the context of each
        self._idle = asyncio.Event()  # nothing is under way
        self._idle.set()
        self._ends = False
        name = arguments.served_model_name or decoder.bundle.target.name
        self._model = {"served_model_name": name}
        self._card = str(card)

    def worker_config(self) -> Any:
        names = ("namespace", "component", "endpoint", "discovery_backend", "request_plane", "event_plane")
        where = {name: getattr(self._arguments, name) for name in names}
        chats = self._decoder.bundle.tokenizer.chat_template is not None
        kinds = "chat,completions" if chats else "completions"
        return WorkerConfig(**where, **self._model, model_name=self._card, endpoint_types=kinds)

    async def start(self, worker_id: int) -> Any:
        """Begin to step, and tell Dynamo what it has to know of the model."""
        self.stepper.start()
        self._ending = asyncio.create_task(self._end_with_the_decoder())
        room = LlmRegistration(
            context_length=self._decoder.bundle.max_length,
            kv_cache_block_size=BLOCK_TOKENS,
            max_num_seqs=self._arguments.max_batch,
        )
        return EngineConfig(**self._model, model=self._card, llm=room)

    async def generate(self, request: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        """Yield the tokens of each round that are certain, and with the last of them why they end."""
        normalize_request_token_ids(request)
        if (request.get("stop_conditions") or {}).get("max_tokens") == 0:  # it moved when all was said
            yield {"token_ids": [], "index": 0, "finish_reason": "length"}
            return
        try:
            wanted = await self._wanted(request, context.id())
            if context.is_stopped() or context.is_killed():  # while its images were read
                yield {"token_ids": [], "index": 0, "finish_reason": "cancelled"}
                return
            group = self.stepper.submit([wanted], every_round=True)
        except RequestError as error:
            raise InvalidArgument(str(error)) from error
        except ApiError as error:  # else it drains, holds too many images, or its decoder has died
            raise (InvalidArgument if error.status < 500 else EngineShutdown)(str(error)) from error
        self._under_way[group] = context
        self._idle.clear()
        [ours] = group.requests
        exact = wanted.params.greedy or wanted.params.rule == "coupled"
        pieces: list[Piece] = []
        try:
            while not ours.finished:
                for _, new, _ in await group.progress():
                    pieces += new
                # Another worker must neither miss half a stop string nor draw again what was held back.
                if pieces and not ours.finished and (pieces[-1].settled or not exact):
                    yield chunk_of(pieces, self._spelling)
                    pieces = []
            if self.stepper.error is not None:
                raise EngineShutdown(DEAD)
            try:
                ours.output()  # raises the error of a request that failed
            except EngineEnded as error:  # of which the thread that steps is about to die
                raise EngineShutdown(DEAD) from error
            if self._ends and ours.finish_reason == "cancelled":
                raise EngineShutdown("this worker ends; another one goes on")
            usage = {"completion_usage": usage_of(ours.output().usage, wanted.said)} if wanted.pictures else {}
            last = chunk_of([*pieces, *ours.take()], self._spelling)
            yield last | usage | {"finish_reason": ours.finish_reason}
        finally:
            del self._under_way[group]
            group.cancel()
            if not self._under_way:
                self._idle.set()

    async def _wanted(self, request: dict[str, Any], request_id: str) -> Submission:
        """Turn a request into ours. Its images are read once nothing else is refused."""
        urls, decoder = urls_of(request), self._decoder
        asked = request_id, self._arguments.rule, decoder.bundle.max_length
        wanted = submission_of(request, *asked)
        if not urls:
            return wanted
        pictures = await self._images.pictures(urls)
        self._hashes.note([picture.digest for picture in pictures], hashes_of(request))
        assert decoder.images is not None, "else there were no pictures"
        ids, said = await asyncio.to_thread(placed, request, pictures, decoder.images, decoder.tokenizer)
        return submission_of({**request, "token_ids": ids}, *asked, pictures)._replace(said=said)

    async def abort(self, context: Any) -> None:
        for group, own in self._under_way.items():
            if own.is_stopped() or own.is_killed():
                group.cancel()

    async def health_check_payload(self) -> Any:
        """A request that a worker in good health answers at once."""
        return build_health_check_payload(self._decoder.bundle.tokenizer.bos_token_id or 0)

    async def kv_event_sources(self) -> list[Any]:
        return [PushSource(on_ready=self._publish)]

    def _publish(self, publisher: Any) -> None:
        self._decoder.prefixes.watcher = Publishing(publisher, self._hashes)

    async def cleanup(self) -> None:
        """Finish what is under way, and leave what takes too long to other workers."""
        await self._until_idle(self._arguments.drain_seconds)
        self._ends = True
        for group in self._under_way:
            group.cancel()
        await self._until_idle(LINGER_SECONDS)
        await self.stepper.close()
        self._decoder.prefixes.watcher = None

    async def _end_with_the_decoder(self) -> None:
        await self.stepper.dead.wait()
        os.kill(os.getpid(), signal.SIGTERM)  # so that Dynamo asks it no more

    async def _until_idle(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), seconds)
