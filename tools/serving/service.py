"""The service that the endpoints share: the decoder and its stepper, its chat template, and its name."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.concurrency import run_in_threadpool

from ...engines import RequestError
from ...engines.errors import counted
from ...runtime import Decoder, SamplingParams
from ...runtime.images.picture import Picture, more_tokens
from ...runtime.state.asked import DraftLength
from ...runtime.transcribing.transcriber import Transcriber
from .answers import ModelCard
from .bodies import Generation, Sampling
from .encoding import Longest
from .errors import ApiError, in_terms_of
from .formats import RequestedGrammar
from .images import ImageLoader
from .kept_answers import KeptAnswers
from .marks import Marks, marks_of
from .metrics import Metrics
from .sampling_fields import predicted_text, sampling_fields, seed_of_choice
from .stepper import Stepper
from .templates import ChatTemplate
from .tickets import Submission, Ticket
from .tokenising import HUGE_TEXT, encoded
from .tokens import Spelling

if TYPE_CHECKING:
    from .tracing import Traces

Result = TypeVar("Result")

LONG_TEXT = 2000  # characters that take longer to tokenise than a thread to start
MOST_COUNTED = 2**18  # tokens of a text that need not fit the model, since it is only counted, shown, or cut
MOST_COMPILING = 128  # grammars that wait in threads; those are not threads in which others are tokenised
DEFAULTS: Mapping[str, Any] = {"temperature": 1.0, "rule": "rejection"}  # of requests, by names of SamplingParams


@dataclass
class Service:
    """One model, served."""

    stepper: Stepper
    spelling: Spelling
    template: ChatTemplate | None
    names: Sequence[str]
    metrics: Metrics
    longest: Longest
    images: ImageLoader
    reasoning: Marks | None = None  # around what the model reasons, if that is separated from its answer
    draft_length: DraftLength | None = None  # of requests that ask for none
    drafter: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=lambda: DEFAULTS)
    kept_answers: KeptAnswers = field(default_factory=KeptAnswers)
    traces: "Traces | None" = None
    adapter_root: Path | None = None  # a folder from which clients may load adapters; None: they may not
    lasting: frozenset[str] = frozenset()  # adapters that they may not unload, since they did not load them
    keep_alive_seconds: float = 10.0
    created: int = field(default_factory=lambda: int(time.time()))
    _one_long: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    one_body: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    _compiling: CapacityLimiter = field(default_factory=lambda: CapacityLimiter(MOST_COMPILING))

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def decoder(self) -> Decoder:
        return self.stepper.decoder

    @property
    def max_length(self) -> int:
        return self.decoder.bundle.max_length

    @property
    def known(self) -> list[str]:
        """The names that a request may call the model by: its own, and those of adapters."""
        return [*self.names, *self.decoder.adapters]

    @cached_property
    def fingerprint(self) -> str:
        """The same for the same bundle in the same engine."""
        content = self.decoder.bundle.manifest() + self.decoder.engine
        return "fp_" + hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def cards(self) -> list[ModelCard]:
        """A card for each of the model's names, and for each adapter."""
        own = [ModelCard(name, self.created, self.max_length) for name in self.names]
        return own + [
            ModelCard(name, self.created, self.max_length, parent=self.name) for name in self.decoder.adapters
        ]

    def require_new(self, adapter: str) -> None:
        """Refuse an adapter by the name of the model itself, or of another adapter."""
        if adapter in self.names or adapter in self.decoder.adapters:
            raise ApiError(400, f"{adapter!r} is served already; choose another name", "lora_name")

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a model's name means; a name of the model itself means none."""
        return None if model is None or model in self.names else model

    def require_model(self, asked: str | None) -> None:
        if asked is not None and asked not in self.known:
            expected = " or ".join(map(repr, self.known))
            raise ApiError(404, f"model {asked!r} is not served here, expected {expected}", "model", "model_not_found")

    @cached_property
    def transcriber(self) -> Transcriber:
        return Transcriber(self.decoder)

    @property
    def most_counted(self) -> int:
        return max(MOST_COUNTED, self.max_length)

    def most_of(self, body: Sampling) -> int:
        """How many tokens a body's prompt may have before it is cut."""
        return self.max_length if body.truncate_prompt_tokens is None else self.most_counted

    async def encode(
        self, text: str, add_special_tokens: bool = True, field: str = "prompt", most: int | None = None
    ) -> list[int]:
        """Tokenise a text, a long one in a thread, since the event loop must not wait."""
        most = self.max_length if most is None else most
        self.longest.require(len(text), most, field)
        encode = partial(encoded, self.decoder.tokenizer, text, add_special_tokens, most, field)
        return encode() if len(text) < LONG_TEXT else await self.aside(encode, len(text))

    async def source(self, given: str | list[int]) -> list[int]:
        """Tokenise what an encoder shall read."""
        encoder = self.decoder.bundle.encoder
        if encoder is None or encoder.contract.sound is not None:
            raise ApiError(400, "source is for models with an encoder of text, as T5 has; leave it out", "source")
        if isinstance(given, list):
            return given
        return await self.encode(given, field="source", most=encoder.contract.longest)

    async def beginning(self, prompt: str | list[int], source: Sequence[int] | None, most: int) -> list[int]:
        """Tokenise what a text begins with; with a source the model's own tokens come before it."""
        if isinstance(prompt, list):
            return prompt
        own = () if source is None else self.decoder.bundle.tokenizer.start_ids
        return [*own, *await self.encode(prompt, add_special_tokens=source is None, most=most)]

    async def aside(self, work: Callable[[], Result], characters: int) -> Result:
        """Read a text in a thread; long ones one after another, so that the rounds keep their cores."""
        if characters < LONG_TEXT:
            return await run_in_threadpool(work)
        async with self._one_long if characters < HUGE_TEXT else self.images.one:
            return await run_in_threadpool(work)

    async def submissions(
        self,
        body: Generation,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        caller: str,
        asked: RequestedGrammar | None,
        source: Sequence[int] | None = None,
        pictures: Sequence[Picture] = (),
        **more: Any,
    ) -> list[Submission]:
        """The requests that a body asks for: n for each prompt, which differ in their seeds.

        What a `caller` leaves is found by nobody else, since the time of an answer would tell what others have asked.
        """
        if (encoder := self.decoder.bundle.encoder) is not None and source is None:
            if encoder.contract.sound is not None:
                raise ApiError(400, "the model hears: send sound to /v1/audio/transcriptions", code="model_hears")
            raise ApiError(400, "the model has an encoder: send the text to /v1/completions as source", "source")
        for name in ("logit_bias", "allowed_token_ids"):
            if (count := len(getattr(body, name) or ())) > self.decoder.vocab_size:
                raise RequestError(
                    f"{name} has {count:,} entries, the vocabulary has {self.decoder.vocab_size:,}; send less", name
                )
        if (body.num_beams or 1) > 1 and (body.n or 1) > 1:
            raise ApiError(400, "a search with num_beams gives its best text alone; leave n or num_beams out", "n")
        wanted = []
        fields = {**self.defaults, **sampling_fields(body), **more}
        predicted = await self.encode(predicted_text(body), add_special_tokens=False, field="prediction")
        if asked is not None:
            fields["grammar"] = asked.grammar
            with in_terms_of({"grammar": asked.field}):
                await to_thread.run_sync(self.decoder.compile_grammar, asked.grammar, limiter=self._compiling)
        for prompt in prompts:
            length = len(prompt) + more_tokens(pictures)
            room = self.max_length - length
            if room < max(max_tokens or 1, 1):
                raise ApiError(
                    400,
                    f"the prompt has {counted(length, 'token')} and max_tokens is {max_tokens or 1}, the model takes "
                    f"{self.max_length} together; shorten either",
                    "messages" if hasattr(body, "messages") else "prompt",
                    "context_length_exceeded",
                )
            for choice in range(body.n or 1):
                params = SamplingParams(
                    **fields,
                    max_new_tokens=room if max_tokens is None else max(max_tokens, 1),
                    seed=None if body.seed is None else seed_of_choice(body.seed, choice),
                )
                salt = f"{caller}/{body.cache_salt or ''}" if caller else body.cache_salt or ""
                searches = params.num_beams > 1  # for which the defaults of other requests are none
                usual = None if searches else self.draft_length
                drafted = usual if body.draft_length is None else body.draft_length
                drafter = body.drafter or (None if predicted or searches else self.drafter)
                priority = body.priority or 0
                adapter = self.adapter_of(body.model)
                wanted.append(
                    Submission(
                        prompt, params, drafted, drafter, salt, predicted, priority, source, caller, adapter, pictures
                    )
                )
        return wanted

    def truncated(self, prompt: list[int], body: Sampling, max_tokens: int | None) -> list[int]:
        """Return the last tokens of a prompt: as many as a body says, or as many as fit if it says -1."""
        most = body.truncate_prompt_tokens
        if most is None:
            return prompt
        return prompt[-max(1, self.max_length - max(max_tokens or 1, 1) if most < 0 else most) :]


def open_service(
    decoder: Decoder,
    max_waiting: int = 256,
    names: Sequence[str] = (),
    chat_template: str | None = None,
    reasoning_parser: str | None = None,
    draft_length: DraftLength | None = None,
    drafter: str | None = None,
    defaults: Mapping[str, Any] = DEFAULTS,
    traces: "Traces | None" = None,
    adapters: Sequence[tuple[str, Path]] = (),
    adapter_root: Path | None = None,
    image_hosts: Iterable[str] = (),
) -> Service:
    """Serve an open decoder; `chat_template` takes the place of the bundle's own."""
    bundle, images = decoder.bundle, ImageLoader.of(decoder, image_hosts)
    left_open = {**DEFAULTS, **defaults}
    decoder.require_drafting(draft_length, drafter, SamplingParams(**left_open))
    names = names or [bundle.target.name]
    name = names[0]
    source = chat_template or bundle.tokenizer.chat_template
    metrics = Metrics(name)

    def on_end(ticket: Ticket) -> None:
        metrics.count(ticket)
        if traces is not None:
            traces.note(ticket)

    stepper = Stepper(decoder, max_waiting, on_end)
    kept = KeptAnswers()
    metrics.watch(stepper, name, kept)
    template = None if source is None else ChatTemplate(source, decoder.tokenizer, bundle.tokenizer, decoder.images)
    spelling = Spelling(decoder.tokenizer, bundle.tokenizer_file)
    longest = Longest(decoder.tokenizer, bundle.tokenizer_file)
    marks = None if reasoning_parser is None else marks_of(reasoning_parser, template.special if template else ())
    own = draft_length, drafter, left_open, kept, traces, adapter_root, frozenset(adapter for adapter, _ in adapters)
    service = Service(stepper, spelling, template, names, metrics, longest, images, marks, *own)
    for adapter, folder in adapters:
        if adapter in names:
            raise RequestError(f"{adapter!r} is the name of the model itself; give the adapter another")
        decoder.load_adapter(adapter, folder)
    return service
