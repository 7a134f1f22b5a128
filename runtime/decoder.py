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

from ..engines import Bundle, BundleError, EngineError, RequestError, open_engines
from ..engines.errors import first_line
from .frame import Frame
from .metrics import Speculation
from .model import Model
from .params import SamplingParams
from .request import Output, Piece, Request
from .scheduler import Scheduler
from .text import TextStream

DEFAULT_DRAFT_LENGTH = 4

Prompt = str | Sequence[int]


class Decoder:
    """Decodes many requests together, one round at a time.

    `submit` and `cancel` may be called from any thread; one thread at a time is inside `step`.
    """

    def __init__(self, bundle: Bundle, engine: str, device: str, max_batch: int, capture: bool) -> None:
        if type(max_batch) is not int or max_batch < 1:
            raise RequestError(f"max_batch is {max_batch!r}, expected a whole number >= 1")
        self.bundle = bundle
        self.max_batch = max_batch
        self.vocab_size = bundle.tokenizer.vocab_size
        self.tokenizer = _read_tokenizer(bundle)
        graphs = [(bundle.graph(role), entry.contract) for role, entry in bundle.models.items()]
        self._on_stream = _own_stream(device) if device.startswith("cuda") else nullcontext()
        with self._on_stream:
            engines = open_engines(engine, graphs, device)
            try:
                models = [Model(opened, self.vocab_size, max_batch, bundle.capacity) for opened in engines]
            except BaseException:
                for opened in engines:
                    opened.close()
                raise
            self.target, self.draft = models[0], models[1] if len(models) > 1 else None
            self._scheduler = Scheduler(self.target, self.draft, max_batch, bundle.capacity, capture)
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
        return cls(opened, engine, device, max_batch, capture)

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
        draft_length: int | None = None,
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
        draft_length: int | None = None,
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
        draft_length: int | None = None,
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
        longest_draft = self.target.engine.verify_width - 1
        if draft_length is None:
            draft_length = min(DEFAULT_DRAFT_LENGTH, longest_draft)
        drafter = drafter or ("lookup" if self.draft is None else "model")
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
            has_model=self.draft is not None,
            longest_draft=longest_draft,
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
            return self._scheduler.step()

    @contextmanager
    def between_rounds(self) -> Iterator[None]:
        """Where the last frame's steps may be run again, each on its own: they write what is there."""
        with self._step_lock, torch.inference_mode(), self._on_stream:
            yield

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


def _read_tokenizer(bundle: Bundle) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(bundle.tokenizer_file))
    except Exception as error:  # the library raises plain Exceptions
        raise BundleError(f"{bundle.tokenizer_file} is no tokenizer ({error}); export the bundle again") from error
