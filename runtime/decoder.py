"""The decoder: submit, step, cancel, and their clients generate and stream."""

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from tokenizers import Tokenizer

from ..engines import Bundle, BundleError, Engine, EngineError, RequestError, open_engines
from ..engines.errors import first_line
from .drafters.ngram import read_ngrams
from .drafters.propose import SOURCES, WITH_MODEL
from .lengths.controller import Controller
from .lengths.costs import Costs, read_costs
from .lengths.entropy import EntropyRule
from .memory.model import Model
from .requests.metrics import Speculation
from .requests.request import AUTO, MIXED, Output, Piece, Request
from .requests.text import TextStream
from .round.frame import Frame
from .sampling.params import SamplingParams
from .scheduler import Scheduler

DEFAULT_DRAFT_LENGTH = 4

Prompt = str | Sequence[int]
DraftLength = int | str | EntropyRule  # a number, "auto", or a rule of its own


class Decoder:
    """Decodes many requests together, one round at a time.

    `submit` and `cancel` may be called from any thread; one thread at a time is inside `step`.
    """

    def __init__(
        self, bundle: Bundle, engine: str, device: str, max_batch: int, capture: bool, costs: Costs | None
    ) -> None:
        if type(max_batch) is not int or max_batch < 1:
            raise RequestError(f"max_batch is {max_batch!r}, expected a whole number >= 1")
        self.bundle = bundle
        self.max_batch = max_batch
        self.vocab_size = bundle.tokenizer.vocab_size
        self.tokenizer = _read_tokenizer(bundle)
        graphs = [(bundle.graph(role), entry.contract) for role, entry in bundle.models.items()]
        self._on_stream = _own_stream(device) if device.startswith("cuda") else nullcontext()
        with self._on_stream:
            engines: list[Engine] = []
            try:
                engines += open_engines(engine, graphs, device)
                models = [Model(opened, self.vocab_size, max_batch, bundle.capacity) for opened in engines]
                ngrams = read_ngrams(bundle, device)
            except BaseException as error:
                for opened in engines:
                    opened.close()
                if isinstance(error, torch.OutOfMemoryError):
                    raise _no_memory(bundle, max_batch, error) from error
                raise
            self.target, self.draft = models[0], models[1] if len(models) > 1 else None
            self._controller = Controller(costs, self._longest_draft) if costs else None
            self._scheduler = Scheduler(
                self.target, self.draft, ngrams, max_batch, bundle.capacity, capture, self._controller
            )
        self._unavailable: dict[str, str] = {}  # drafters, and why
        if self.draft is None:
            self._unavailable |= dict.fromkeys(WITH_MODEL, "the bundle has no draft model; use drafter lookup or none")
        elif self.draft.engine.verify_width < self.target.engine.verify_width:
            self._unavailable["cascade"] = (
                f"the draft model gives logits of {self.draft.engine.verify_width} tokens a step here, drafter cascade "
                "needs as many as the target; use drafter model"
            )
        if ngrams is None:
            self._unavailable["ngram"] = (
                f"the bundle has no table of n-grams; count one with trt-spec ngram --bundle {bundle.path} --text FILE"
            )
        self._step_lock = threading.RLock()
        self._closed = False

    @classmethod
    def open(
        cls,
        bundle: Path | str | Bundle,
        engine: str = "onnxruntime",
        device: str = "cpu",
        max_batch: int = 8,
        *,
        capture: bool = True,
    ) -> Self:
        """Verify a bundle and open its graphs in an engine.

        With `capture` a round that comes back is one CUDA graph, where engine and device can; it changes no token.
        """
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        return cls(opened, engine, device, max_batch, capture, read_costs(opened, engine, device))

    def close(self) -> None:
        with self._step_lock:
            self._closed = True
            self._scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Clients of the core.

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        draft_length: DraftLength | None = None,
        drafter: str | None = None,
        trace: bool = False,
    ) -> list[Output]:
        """Complete prompts (text or token ids) together; the outputs come in the order of the prompts."""
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        each: Sequence[Any] = [prompts] if single else prompts
        settings = [params] * len(each) if params is None or isinstance(params, SamplingParams) else params
        if len(settings) != len(each):
            raise RequestError(f"there are {len(settings)} SamplingParams for {len(each)} prompts, expected one each")
        requests: list[Request] = []
        try:
            for prompt, setting in zip(each, settings, strict=True):
                requests.append(self.submit(prompt, setting, draft_length=draft_length, drafter=drafter, trace=trace))
            while not all(request.finished for request in requests):
                self.step()
        finally:
            for request in requests:
                self.cancel(request)
        return [request.output() for request in requests]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        draft_length: DraftLength | None = None,
        drafter: str | None = None,
    ) -> Iterator[Piece]:
        """Complete one prompt piece by piece; leaving the loop cancels the request."""
        request = self.submit(prompt, params, draft_length=draft_length, drafter=drafter)
        try:
            while not request.finished:
                self.step()
                yield from request.take()
            yield from request.take()  # another client's step may have finished it
        finally:
            self.cancel(request)

    # The core.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        draft_length: DraftLength | None = None,
        drafter: str | None = None,
        trace: bool = False,
    ) -> Request:
        """Queue a request; it is validated here and starts in one of the next steps."""
        params = params or SamplingParams()
        ids = self._encode(prompt)
        room = self.bundle.max_length - params.max_new_tokens
        if len(ids) > room:
            raise RequestError(
                f"prompt of {len(ids)} tokens and max_new_tokens {params.max_new_tokens} exceed the bundle's "
                f"{self.bundle.max_length} by {len(ids) - room}; shorten either"
            )
        for token in (*params.logit_bias, *params.stop_token_ids):
            self._require_token(token, "parameter")
        banned = sum(bias == -math.inf for bias in params.logit_bias.values())
        if banned == self.vocab_size:
            raise RequestError(f"logit_bias bans all {banned} tokens of the vocabulary; leave at least one")
        drafter = drafter or ("lookup" if self.draft is None else "model")
        if draft_length is None:
            draft_length = self.default_draft_length(drafter, params)
        stop_ids = frozenset(params.stop_token_ids) | frozenset(
            () if params.ignore_eos else self.bundle.tokenizer.eos_token_ids
        )
        text = TextStream(self.tokenizer, ids, params.stop)
        request = Request(
            ids,
            params,
            draft_length,
            drafter,
            stop_ids,
            text,
            unavailable=self._unavailable,
            longest_draft=self._longest_draft,
            controller=self._controller,
            trace=trace,
        )
        self._require_open()
        self._scheduler.submit(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request; one that is live leaves in the next step. Ending a finished one does nothing."""
        self._scheduler.cancel(request)

    def step(self) -> bool:
        """Admit and prefill what fits, run one round for all live requests; False when nothing is left to do."""
        with self._step_lock, torch.inference_mode(), self._on_stream:
            self._require_open()
            try:
                return self._scheduler.step()
            except torch.OutOfMemoryError as error:
                raise _no_memory(self.bundle, self.max_batch, error) from error

    @contextmanager
    def between_rounds(self) -> Iterator[None]:
        """Where the last frame's steps may be run again, each on its own: they write what is there."""
        with self._step_lock, torch.inference_mode(), self._on_stream:
            yield

    def forget_outputs(self) -> None:
        """What ended requests said, from which the drafter suffix copies, too."""
        with self._step_lock:
            self._scheduler.forget_outputs()

    @property
    def speculation(self) -> Speculation:
        """What speculation did for all requests so far."""
        return self._scheduler.speculation

    @property
    def live(self) -> tuple[Request, ...]:
        """The requests that are decoding; request i has row i."""
        return tuple(self._scheduler.live)

    @property
    def last_frame(self) -> Frame | None:
        """The tensors of the last round and the engines' runs over them, for measuring."""
        return self._scheduler.frame

    @property
    def _longest_draft(self) -> int:
        return self.target.engine.verify_width - 1

    @property
    def drafters(self) -> tuple[str, ...]:
        """The sources of proposals that this bundle has."""
        return tuple(source for source in SOURCES if source not in self._unavailable)

    def default_draft_length(self, drafter: str, params: SamplingParams | None = None) -> DraftLength:
        """The controller's choice where it knows the costs, and where no text changes with it that was promised."""
        known = self._controller is not None and drafter in self._controller.costs.acceptance
        if drafter == MIXED or (known and not (params and params.keeps_its_draft)):
            return AUTO
        return min(DEFAULT_DRAFT_LENGTH, self._longest_draft)

    def _require_open(self) -> None:
        if self._closed:
            raise RequestError("the decoder is closed; open another")

    def _encode(self, prompt: object) -> list[int]:
        if isinstance(prompt, str):
            try:
                prompt.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"the prompt is no valid Unicode ({error}); clean it first") from error
            ids: list[int] = self.tokenizer.encode(prompt).ids
        elif isinstance(prompt, Sequence):
            ids = list(prompt)
        else:
            raise RequestError(f"the prompt is {prompt!r}, expected text or a list of token ids")
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        for token in ids:
            self._require_token(token, "prompt")
        return ids

    def _require_token(self, token: int, where: str) -> None:
        if type(token) is not int or not 0 <= token < self.vocab_size:
            raise RequestError(f"{where} token id {token!r} is outside the vocabulary of {self.vocab_size} tokens")


def _own_stream(device: str) -> AbstractContextManager[None]:
    """On the default stream nothing can be captured."""
    try:
        return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except (RuntimeError, AssertionError) as error:
        raise EngineError(
            f"device {device!r} cannot be used ({first_line(error)}); expected cpu or cuda; trt-spec doctor says more"
        ) from error


def _no_memory(bundle: Bundle, rows: int, error: torch.OutOfMemoryError) -> EngineError:
    weights = sum(map(bundle.weight_bytes, bundle.models)) / 2**20
    per_token = sum(model.contract.cache_bytes_per_token for model in bundle.models.values()) / 2**20
    return EngineError(
        f"the GPU has no memory left ({first_line(error)}): weights take {weights:,.0f} MiB, caches "
        f"{per_token * rows * bundle.capacity:,.0f} MiB for {rows} rows of {bundle.capacity} tokens, the engine its "
        "workspace; lower max_batch, or export with a shorter --max-length or smaller weights"
    )


def _read_tokenizer(bundle: Bundle) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(bundle.tokenizer_file))
    except Exception as error:  # the library raises plain Exceptions
        raise BundleError(f"{bundle.tokenizer_file} is no tokenizer ({error}); export the bundle again") from error
