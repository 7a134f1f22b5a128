"""The decoder: submit, step and cancel requests; generate and stream build on these."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from ..engines import ENGINES, Bundle, RequestError, together
from ..engines.errors import counted
from .acceptance.sampling_params import SamplingParams
from .beams.able import beamless, refuse_long
from .drafters import Resources, open_drafters
from .grammars.grammar import Grammar
from .images.picture import Picture
from .lengths.costs import Costs, read_costs
from .lengths.drafting import DraftingRules
from .memory.adapter_files import read_adapter
from .memory.adapter_pool import AdapterPool, Loaded
from .memory.held import MemoryShortage
from .requests.output import Output, Piece
from .requests.prompts import Prompt, read_tokenizer, several
from .requests.request import Request
from .scheduling.engine_choice import resolve
from .scheduling.intake import Intake
from .scheduling.models import Models
from .scheduling.opening import Engines, devices_for, open_graphs, own_stream
from .scheduling.scheduler import Scheduler
from .scheduling.shown import Shown
from .state.asked import DraftLength


class Decoder(Shown):
    """Decodes many requests together, one round at a time.

    `submit` and `cancel` may be called from any thread; one thread at a time is inside `step`.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        engine: str,
        devices: Sequence[str],
        max_batch: int,
        capture: bool,
        cache_bytes: int | None,
        prefix_bytes: int | None,
        costs: Costs | None,
    ) -> None:
        self.bundle = bundle
        self.engine = engine  # that of all models, or the target's and the drafts'
        self.max_batch = max_batch
        self.vocab_size = bundle.tokenizer.vocab_size
        self.tokenizer = read_tokenizer(bundle)
        self._on_stream = own_stream(devices[0])
        self._memory_shortage = MemoryShortage(bundle, max_batch)
        with ExitStack() as opened, self._on_stream, self._memory_shortage:
            engines = self._open_graphs(devices, opened)
            self._models = models = Models(bundle, engines, max_batch, cache_bytes, prefix_bytes)
            self.target, self.drafts, self.models = models.target, models.drafts, models.named
            self.draft = self.drafts[0] if bundle.drafts else None
            self.foreign = models.foreign_draft(bundle, self.tokenizer)
            drafters, unavailable = open_drafters(Resources(bundle, self.target, self.models, max_batch, self.foreign))
            self._rules = DraftingRules.of(
                self.target.engine, drafters, unavailable, beamless(self.target, drafters), costs
            )
            self._intake = Intake(bundle, self.tokenizer, self._rules)
            self._scheduler = Scheduler(models, drafters, self._rules, max_batch, bundle.capacity, capture)
            opened.pop_all()  # nothing failed, so the engines stay open
        self._own_threads = any(one.own_threads for one in engines.models)
        self._step_lock = threading.RLock()
        self._loading = threading.Lock()  # one adapter at a time
        self._closed = False

    @classmethod
    def open(
        cls,
        bundle: Path | str | Bundle,
        engine: str = "onnxruntime",
        device: str = "cpu",
        max_batch: int = 8,
        *,
        draft_engine: str | None = None,
        capture: bool = True,
        cache_bytes: int | None = None,
        prefix_bytes: int | None = None,
        devices: Sequence[str] | None = None,
    ) -> Self:
        """Verify a bundle and open its graphs in an engine, or its drafts in an engine of their own.

        Engine auto takes for each what `trt-spec tune --engine auto` found fastest here for up to `max_batch` requests.

        The caches of all models take at most `cache_bytes`; requests wait until what they may need fits. Up to
        `prefix_bytes` more keep what requests leave, so that one that begins like another is not read again; this can
        change near ties only. With `capture`, rounds that repeat run as one CUDA graph if engine and device can, which
        changes no token.

        A target in shards runs on `devices`, one for each shard; all else runs on the first. Without, they are the
        first of the kind that `device` names.
        """
        if type(max_batch) is not int or max_batch < 1:
            raise RequestError(f"max_batch is {max_batch!r}, expected a whole number >= 1")
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        devices = devices_for(opened, device, devices)
        engine = together(resolve(opened, engine, devices[0], max_batch), draft_engine)
        costs = read_costs(opened, engine, devices[0])
        return cls(
            opened,
            engine=engine,
            devices=devices,
            max_batch=max_batch,
            capture=capture,
            cache_bytes=cache_bytes,
            prefix_bytes=prefix_bytes,
            costs=costs,
        )

    def close(self) -> None:
        """Free all memory; requests that have not ended fail."""
        with self._step_lock:
            if not self._closed:
                self._closed = True
                self._scheduler.close()
                if self._models.adapters is not None:
                    self._models.adapters.close()
                self._intake.grammars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Clients of the core.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] = (),
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        draft_length: DraftLength | None = None,
        drafter: str | None = None,
        trace: bool = False,
        sources: Sequence[Any] | None = None,
        adapter: str | None = None,
        images: Sequence[Sequence[bytes | Picture]] | None = None,
    ) -> list[Output]:
        """Complete prompts (text or token ids) together; the outputs come in the order of the prompts.

        Where the bundle has an encoder there is one source for each, and the prompts may be left out. Where its target
        sees there may be `images` for each.
        """
        requests: list[Request] = []
        try:
            asked: dict[str, Any] = {"draft_length": draft_length, "drafter": drafter, "trace": trace}
            asked["adapter"] = adapter
            for prompt, setting, source, seen in several(prompts, params, sources, images):
                requests.append(self.submit(prompt, setting, source=source, images=seen, **asked))
            while not all(request.finished for request in requests):
                self.step()
        finally:
            for request in requests:
                self.cancel(request)
        return [request.output() for request in requests]

    def stream(
        self,
        prompt: Prompt = (),
        params: SamplingParams | None = None,
        *,
        draft_length: DraftLength | None = None,
        drafter: str | None = None,
        source: Any = None,
        adapter: str | None = None,
        images: Sequence[bytes | Picture] = (),
    ) -> Iterator[Piece]:
        """Complete one prompt piece by piece; leaving the loop cancels the request."""
        asked: dict[str, Any] = {"draft_length": draft_length, "drafter": drafter, "images": images}
        request = self.submit(prompt, params, source=source, adapter=adapter, **asked)
        try:
            while not request.finished:
                self.step()
                yield from request.take()
            yield from request.take()  # another client's step may have finished it
            request.output()  # raises the error of a failed request
        finally:
            self.cancel(request)

    # The core.

    def submit(
        self,
        prompt: Prompt = (),
        params: SamplingParams | None = None,
        *,
        draft_length: DraftLength | None = None,
        drafter: str | None = None,
        trace: bool = False,
        on_progress: Callable[[Request], None] | None = None,
        cache_salt: str = "",
        prediction: Prompt = (),
        priority: int = 0,
        source: Any = None,
        adapter: str | Loaded | None = None,
        images: Sequence[bytes | Picture] = (),
        said: int = 0,
    ) -> Request:
        """Validate a request and queue it; it starts in one of the next steps.

        Where the bundle has an encoder, it reads a `source`: text, token ids, or samples of sound, 16,000 a second.
        The output then begins with the model's own first tokens, and a prompt of text follows these; a prompt of
        token ids takes their place.
        Of requests that wait for a row the one with the lowest `priority` starts first, and the oldest of these.
        Requests that begin alike find what it leaves only if they have the same `cache_salt`. A `prediction` of
        the output, such as the text that it edits, makes it faster; drafter suffix, then the default, copies from it.
        Where the target sees, a prompt has a placeholder for each of its `images`: files of PNG, JPEG, WebP or GIF.
        None is among its last tokens, as many as the model has `said` itself before the request moved.
        The target has the `adapter` of this name, if one is named, or one that is held; drafts have none.
        The stepping thread calls `on_progress` with the request after each of its rounds and when it ends; the
        callback must return quickly. To learn only of the end, use `Request.wait`.
        """
        request = self._intake.request(
            prompt,
            params or SamplingParams(),
            draft_length=draft_length,
            drafter=drafter,
            trace=trace,
            on_progress=on_progress,
            cache_salt=cache_salt,
            prediction=prediction,
            priority=priority,
            source=source,
            adapter=self._adapters.named(adapter) if isinstance(adapter, str) else adapter,
            images=images,
            said=said,
        )
        refuse_long(request, (self.target, *self.drafts), self.bundle.capacity)
        seating = self._scheduler.seating
        if not seating.can_hold(request):
            read = counted(len(request.prompt), "token")
            raise RequestError(
                f"prompt of {read} and max_new_tokens {request.params.max_new_tokens} need more cache than "
                "cache_bytes allows; shorten either, or raise it"
            )
        self._require_open()
        if request.adapter is not None:
            self._adapters.join(request, request.adapter)
        seating.submit(request)
        return request

    def load_adapter(self, name: str, folder: Path | str) -> None:
        """Read a LoRA adapter for the target, as PEFT writes it, so that requests may ask for it by this name.

        It is computed beside the target's weights, and rows of one batch may have different ones.
        """
        pool = self._adapters
        with self._loading:
            self._require_open()
            pool.require_new(name)
            read = read_adapter(Path(folder), pool.room, pool.dtype)  # while rounds go on
            with self._memory_shortage, self._on_stream:
                self._models.open_adapters()
            with self.between_rounds(), self._memory_shortage:
                self._require_open()
                pool.load(name, Path(folder), read)

    def unload_adapter(self, name: str) -> None:
        """Refuse this adapter from now on. Requests that have it keep it, and its memory is free once they end."""
        with self.between_rounds():
            self._adapters.unload(name)

    @contextmanager
    def holding_adapter(self, name: str) -> Iterator[Loaded]:
        """Keep an adapter for requests that name it one after the other, although it is unloaded meanwhile."""
        held = self._adapters.hold(name)
        try:
            yield held.adapter
        finally:
            held.finished = True

    @property
    def _adapters(self) -> AdapterPool:
        if self._models.adapters is not None:
            return self._models.adapters
        if self.bundle.target.contract.adapters is None:
            raise RequestError(
                f"bundle {self.bundle.path} has no room for adapters; export it with --adapters", "adapter"
            )
        able = " or ".join(name for name, one in ENGINES.items() if one.adapters)
        raise RequestError(f"engine {self.engine} runs no adapters; use engine {able}", "adapter")

    def require_drafting(self, draft_length: DraftLength | None, drafter: str | None, params: SamplingParams) -> None:
        """Refuse a choice that no request with such params could make here."""
        self._intake.drafting(draft_length, drafter, params)

    def compile_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar ahead, which may take most of a second, so that requests with it are submitted at once."""
        self._intake.grammars.compiled(grammar)

    def cancel(self, request: Request) -> None:
        """End a request. A live one leaves in the next step; a finished one stays as it is."""
        self._scheduler.seating.cancel(request)

    def step(self) -> bool:
        """Admit and prefill what fits, run a round for all live requests; return False when nothing is left to do."""
        with self._step_lock, torch.inference_mode(), self._on_stream, self._memory_shortage:
            self._require_open()
            threads = torch.get_num_threads()
            if not self._own_threads or threads == 1:
                return self._scheduler.step()
            torch.set_num_threads(1)  # a round's own operations are small: leave the engine the cores
            try:
                return self._scheduler.step()
            finally:
                torch.set_num_threads(threads)

    @contextmanager
    def between_rounds(self) -> Iterator[None]:
        """Hold off rounds, so that steps of the last frame can run again: each rewrites what is already there.

        The entries of a tree are the exception: `Frame.settle` then has to put them in order again.
        """
        with self._step_lock, torch.inference_mode(), self._on_stream:
            yield

    def settle(self) -> None:
        """Let engines prepare now what they otherwise would over time, so that measurements show the lasting speed."""
        with self.between_rounds():
            for model in self._models.all:
                model.engine.settle()

    def forget_outputs(self) -> None:
        """Forget ended requests: what drafter suffix copies, what auto expects, and the prefixes that are kept."""
        with self._step_lock:
            self._scheduler.forget_outputs()

    def _open_graphs(self, devices: Sequence[str], opened: ExitStack) -> Engines:
        return open_graphs(self.bundle, self.engine, devices, opened)

    def _require_open(self) -> None:
        if self._closed:
            raise RequestError("the decoder is closed; open another")
