"""The decoder: submit, step and cancel requests; generate and stream build on these."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from ..engines import (
    ENGINES,
    MAX_DRAFT_LENGTH,
    Bundle,
    Engine,
    EngineError,
    RequestError,
    devices_of,
    engines_of,
    open_engines,
    refuse_weights,
    together,
)
from ..engines.bundle import VISION
from ..engines.errors import first_line
from .acceptance.sampling_params import SamplingParams
from .beams.able import beamless, refuse_long
from .drafters import Drafter, Resources, open_drafters
from .grammars.grammar import Grammar
from .images.picture import Picture
from .images.reader import ImageReader
from .lengths.controller import Controller
from .lengths.costs import Costs, read_costs
from .lengths.drafting import DraftingRules
from .memory.adapter_files import read_adapter
from .memory.adapter_pool import AdapterPool, Loaded
from .memory.held import MemoryShortage, held_bytes
from .memory.model import Model, refuse_drafts
from .memory.prefixes import Prefixes
from .requests.metrics import Speculation
from .requests.output import Output, Piece
from .requests.prompts import Prompt, read_tokenizer
from .requests.request import Request
from .scheduling.engine_choice import resolve
from .scheduling.intake import Intake
from .scheduling.models import Models
from .scheduling.occupants import Occupant
from .scheduling.scheduler import Scheduler
from .state.asked import DraftLength
from .state.frame import Frame


class Decoder:
    """Decodes many requests together, one round at a time.

    `submit` and `cancel` may be called from any thread; one thread at a time is inside `step`.
    """

    def __init__(
        self,
        bundle: Bundle,
        *,
        engine: str,
        device: str,
        max_batch: int,
        capture: bool,
        cache_bytes: int | None,
        prefix_bytes: int | None,
        costs: Costs | None,
        devices: Sequence[str] = (),
    ) -> None:
        self.bundle, self._devices = bundle, devices
        self.engine = engine  # that of all models, or the target's and the drafts'
        self.max_batch = max_batch
        self.vocab_size = bundle.tokenizer.vocab_size
        self.tokenizer = read_tokenizer(bundle)
        self._on_stream = _own_stream(device) if device.startswith("cuda") else nullcontext()
        self._memory_shortage = MemoryShortage(bundle, max_batch)
        with ExitStack() as opened, self._on_stream, self._memory_shortage:
            engines = self._open_engines(device)
            for one in engines:
                opened.callback(one.close)
            encoders = self._open_encoders(device)
            for one in encoders.values():
                opened.callback(one.close)
            eyes = self._open_eyes(device)
            if eyes is not None:
                opened.callback(eyes.close)
            models = Models(bundle, engines, encoders, max_batch, cache_bytes, prefix_bytes, eyes)
            self.target, self.drafts, self.models = models.target, models.drafts, models.named
            self.draft = self.drafts[0] if bundle.drafts else None
            self.foreign = models.foreign_draft(bundle, self.tokenizer)
            drafters, unavailable = open_drafters(Resources(bundle, self.target, self.models, max_batch, self.foreign))
            self._rules = _drafting_rules(self.target, drafters, unavailable, costs)
            self._intake = Intake(bundle, self.tokenizer, self._rules)
            self._scheduler = Scheduler(models, drafters, self._rules, max_batch, bundle.capacity, capture)
            opened.pop_all()  # nothing failed, so the engines stay open
        self._models = models
        self._own_threads = any(one.own_threads for one in engines)
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
        shards = opened.target.contract.shards
        if devices is None:
            devices = devices_of(device, shards)
        elif len(devices) != shards:
            raise RequestError(
                f"{len(devices)} devices are given, the target of bundle {opened.path} is in {shards} shards; name one "
                "for each"
            )
        device = devices[0]
        engine = together(resolve(opened, engine, device, max_batch), draft_engine)
        costs = read_costs(opened, engine, device)
        return cls(
            opened,
            engine=engine,
            device=device,
            max_batch=max_batch,
            capture=capture,
            cache_bytes=cache_bytes,
            prefix_bytes=prefix_bytes,
            costs=costs,
            devices=devices,
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
        each = [()] * len(sources) if sources is not None and len(prompts) == 0 else _prompts(prompts)
        given = [None] * len(each) if sources is None else sources
        if len(given) != len(each):
            raise RequestError(f"there are {len(given)} sources for {len(each)} prompts, expected one each")
        seen: Sequence[Sequence[bytes | Picture]] = [()] * len(each) if images is None else images
        if len(seen) != len(each):
            raise RequestError(f"there are images for {len(seen)} of {len(each)} prompts, expected a list for each")
        settings = [params] * len(each) if params is None or isinstance(params, SamplingParams) else params
        if len(settings) != len(each):
            raise RequestError(f"there are {len(settings)} SamplingParams for {len(each)} prompts, expected one each")
        requests: list[Request] = []
        try:
            asked: dict[str, Any] = {"draft_length": draft_length, "drafter": drafter, "trace": trace}
            asked["adapter"] = adapter
            for prompt, setting, source, own in zip(each, settings, given, seen, strict=True):
                requests.append(self.submit(prompt, setting, source=source, images=own, **asked))
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
    ) -> Request:
        """Validate a request and queue it; it starts in one of the next steps.

        Where the bundle has an encoder, it reads a `source`: text, token ids, or samples of sound, 16,000 a second.
        The output then begins with the model's own first tokens, and a prompt of text follows these; a prompt of
        token ids takes their place.
        Of requests that wait for a row the one with the lowest `priority` starts first, and the oldest of these.
        Requests that begin alike find what it leaves only if they have the same `cache_salt`. A `prediction` of
        the output, such as the text that it edits, makes it faster; drafter suffix, then the default, copies from it.
        Where the target sees, a prompt has a placeholder for each of its `images`: files of PNG, JPEG, WebP or GIF.
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
        )
        refuse_long(request, (self.target, *self.drafts), self.bundle.capacity)
        seating = self._scheduler.seating
        if not seating.can_hold(request):
            raise RequestError(
                f"prompt of {len(request.prompt)} tokens and max_new_tokens {request.params.max_new_tokens} need more "
                "cache than cache_bytes allows; shorten either, or raise it"
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
                self.target.engine.open_adapters()
                for encoder in self._models.encoders:
                    encoder.open_adapters()
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
    def adapters(self) -> Mapping[str, Path]:
        """The adapters that are loaded: the folder of each by its name."""
        pool = self._models.adapters
        return {} if pool is None else {name: one.folder for name, one in dict(pool.loaded).items()}

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

    @property
    def speculation(self) -> Speculation:
        """The counts and times of speculation over all requests so far."""
        return self._scheduler.speculation

    @property
    def by_drafter(self) -> dict[str, Speculation]:
        """The counts of the rounds in which each drafter has proposed, over all requests so far."""
        return self._scheduler.by_drafter

    @property
    def by_adapter(self) -> dict[str, Speculation]:
        """The counts of requests with each adapter that is loaded, since it was."""
        pool = self._models.adapters
        return {} if pool is None else self._scheduler.by_adapter(dict(pool.loaded))

    @property
    def prefixes(self) -> Prefixes:
        """The prefixes kept for requests that begin like others, and how much of the prompts was found there."""
        return self._scheduler.seating.prefixes

    @property
    def live(self) -> tuple[Occupant, ...]:
        """The requests that are decoding; occupant i has row i."""
        return tuple(self._scheduler.live)

    @property
    def cache_usage(self) -> float:
        """The share of the target's cache that holds tokens, out of all that it may hold."""
        most = self._models.most_tokens
        room = self.max_batch * self.bundle.capacity if most is None else max(1, most)
        return min(1.0, sum(self.target.cache.entries) / room)

    @property
    def held_bytes(self) -> dict[str, int]:
        """The bytes that each pool of memory holds now."""
        of_sources = sum(one.kept_bytes for one in self._models.encoders)
        of_sources += 0 if self._models.eyes is None else self._models.eyes.kept_bytes
        pool = self._models.adapters
        return held_bytes(self.bundle, self._models.all, of_sources, 0 if pool is None else pool.held_bytes)

    @property
    def last_frame(self) -> Frame | None:
        """The tensors of the last round and the engines' steps over them, for measuring."""
        return self._scheduler.frame

    @property
    def recorded(self) -> bool:
        """Whether rounds that repeat run as recorded CUDA graphs."""
        return self._scheduler.recorded

    @property
    def recorded_kinds(self) -> int:
        """How many kinds of rounds are recorded now."""
        return self._scheduler.recorded_kinds

    @property
    def replayed(self) -> bool:
        """Whether the last round was such a graph."""
        return self._scheduler.replayed

    @property
    def longest_draft(self) -> int:
        """The most proposals that a round can verify."""
        return self._rules.longest

    @property
    def largest_comb(self) -> int:
        """The most proposals that a comb or a tree may have, 0 where the engine takes lines only."""
        return self._rules.most or 0

    @property
    def growing(self) -> tuple[str, ...]:
        """The drafters that can grow trees here."""
        return self._rules.growing

    @property
    def grammars_given_up(self) -> int:
        """The number of grammars that ended the process in which they were tried, by time or memory."""
        return self._intake.grammars.given_up

    @property
    def costs(self) -> Costs | None:
        """The costs that `trt-spec tune` measured for this bundle here; auto chooses by them."""
        return self._rules.controller.costs if self._rules.controller else None

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafters that this bundle has."""
        return self._rules.drafters

    @property
    def images(self) -> ImageReader | None:
        """What reads images for prompts, None where the target reads text alone."""
        return self._intake.images

    def default_draft_length(self, drafter: str) -> DraftLength:
        """Return what is drafted where nothing else is asked for: auto if its costs are known, else a number."""
        return self._rules.default(drafter)

    def _open_engines(self, device: str) -> list[Engine]:
        """Open the target's engine, and those of the drafts."""
        refuse_drafts(self.bundle)
        bundle, (target, drafts) = self.bundle, engines_of(self.engine)
        names = [*bundle.names, *([bundle.foreign] if bundle.foreign else [])]
        engines = [target, *[drafts] * (len(names) - 1)]
        for engine, name in zip(engines, names, strict=True):
            refuse_weights(engine, name, bundle.models[name].weights)
        graphs = [(bundle.graph(name), bundle.models[name].contract) for name in names]
        return open_engines(engines, graphs, device, devices=self._devices)

    def _open_encoders(self, device: str) -> dict[str, Engine]:
        """Open the encoders by themselves: they run between rounds, so that models share no cores with them."""
        bundle, (target, _) = self.bundle, engines_of(self.engine)
        engine = ENGINES[target].encodes_in
        for name, encoder in bundle.encoders.items():
            refuse_weights(engine, name, encoder.weights)
        graphs = [(bundle.graph(name), encoder.contract) for name, encoder in bundle.encoders.items()]
        opened = open_engines(engine, graphs, device)
        return dict(zip(bundle.encoders, opened, strict=True))

    def _open_eyes(self, device: str) -> Engine | None:
        """Open the graph that sees for the target, in the engine of encoders: it, too, runs between rounds."""
        bundle, (target, _) = self.bundle, engines_of(self.engine)
        if bundle.vision is None:
            return None
        engine = ENGINES[target].encodes_in
        refuse_weights(engine, VISION, bundle.vision.weights)
        return open_engines(engine, [(bundle.graph(VISION), bundle.vision.contract)], device)[0]

    def _require_open(self) -> None:
        if self._closed:
            raise RequestError("the decoder is closed; open another")


def _drafting_rules(
    target: Model, drafters: Mapping[str, Drafter], unavailable: Mapping[str, str], costs: Costs | None
) -> DraftingRules:
    """Say what requests may ask for where the target verifies so many tokens, and these drafters could be opened."""
    most = target.engine.verify_width - 1
    most -= max((one.look_aheads(MAX_DRAFT_LENGTH) for one in drafters.values()), default=0)
    longest = min(most, MAX_DRAFT_LENGTH)
    treeless = {name: reason for name, one in drafters.items() if (reason := one.treeless)}
    controller = Controller(costs, longest, drafters.keys() - treeless, most) if costs else None
    trees = most if target.engine.takes_trees else None
    return DraftingRules(unavailable, longest, trees, controller, treeless, beamless(target, drafters))


def _prompts(prompts: Any) -> Sequence[Any]:
    """Wrap a single prompt, text or token ids, in a list; leave several as they are."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"the prompts are {prompts!r}, expected text, a list of token ids, or a list of prompts")
    return [prompts] if len(prompts) > 0 and isinstance(prompts[0], int) else prompts


def _own_stream(device: str) -> AbstractContextManager[None]:
    """Make a stream of our own, because nothing can be captured on the default stream."""
    try:
        return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except (RuntimeError, AssertionError) as error:
        raise EngineError(
            f"device {device!r} cannot be used ({first_line(error)}); expected cpu or cuda; trt-spec doctor says more"
        ) from error
