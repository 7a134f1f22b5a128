"""One request: what was asked for, and what has come out so far."""

import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from hashlib import sha256
from sys import maxsize
from time import perf_counter

from ...engines import WIDEST_STEP, EngineError, RequestError, TrtSpecError
from ...engines.errors import counted, first_line
from ..acceptance.sampling_params import SamplingParams
from ..grammars.guide import Guide
from ..memory.adapter_pool import Loaded
from ..memory.sight import Sight
from ..sources.source import Source
from ..state.asked import Drafting, DraftLength
from .metrics import Speculation
from .output import BeamText, Output, Piece, TokenLogprob, TracedRound, Usage
from .text import TextStream

NOTHING = Piece("", (), ())
MARK = "\0"


class State(Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"
    LIVE = "live"
    FINISHED = "finished"


class Request:
    """`Decoder.submit` makes requests. Threads other than the stepping one may wait for them and take their pieces."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        stop_ids: frozenset[int],
        text: TextStream,
        drafting: Drafting,
        check: Callable[[object, object, SamplingParams], Drafting],
        guide: Guide | None = None,
        *,
        trace: bool,
        on_progress: "Callable[[Request], None] | None" = None,
        cache_salt: str = "",
        prediction: Sequence[int] = (),
        priority: int = 0,
        source: Source | None = None,
        forced: int = 0,
        adapter: Loaded | None = None,
        sight: Sight | None = None,
    ) -> None:
        self.prompt = tuple(prompt)
        self.prediction = tuple(prediction)
        self.source = source  # of the text
        self.forced = forced  # the last tokens of the prompt that a search counts as said
        self.adapter = adapter
        self.sight = sight  # the images in the prompt
        self.marks = {} if sight is None else sight.marks
        self.images_end = 0 if sight is None else sight.end  # the place after the last entry of one
        # Of requests that begin alike, only those with the same source and adapter may read what this one leaves. No
        # client's salt has the mark that comes after a digest.
        digests = [one.digest for one in (source, adapter) if one is not None]
        self.cache_salt = "".join(f"{one}{MARK}" for one in digests) + cache_salt.replace(MARK, "")
        self.priority = priority
        self.cached_tokens = 0  # of the prompt, which need not be read
        self.params = params
        self.guide = guide  # along the grammar, if the request has one
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self._state = State.WAITING
        self.finished = False  # as the state says, which many ask for in each round
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.beams: tuple[BeamText, ...] = ()
        self.error: TrtSpecError | None = None  # why it ended, if something went wrong
        self.speculation = Speculation()
        self.trace: list[TracedRound] | None = [] if trace else None
        self.cancelled = False
        self.drafting, self._check = drafting, check  # what may be asked for later, too
        self.stop_ids = stop_ids
        self._text = text
        self._on_progress = on_progress
        self._ended = threading.Event()
        self._pieces: deque[Piece] = deque()
        self._logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self._submitted = perf_counter()
        self._admitted: float | None = None
        self._first_token: float | None = None
        self._last_token: float | None = None

    # What was asked for.

    def draft(self, length: DraftLength, drafter: str) -> None:
        """Change draft length and drafter from the next round on; if one is refused, both stay as they were.

        Where wider rounds no longer fit into `cache_bytes`, the youngest request gives up its place. One that is alone
        ends with an error that says so.
        """
        self.drafting = self._check(length, drafter, self.params)

    @property
    def draft_length(self) -> DraftLength:
        return self.drafting.draft_length

    @property
    def drafter(self) -> str:
        return self.drafting.drafter

    # What has come out.

    @property
    def state(self) -> State:
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        if state is State.PREFILLING:
            self._admitted = self._admitted or perf_counter()
        self._state = state
        self.finished = state is State.FINISHED

    @property
    def length(self) -> int:
        """The number of committed tokens."""
        return len(self.prompt) + len(self.token_ids)

    def begin(self, window: int) -> int:
        """Return where a round begins to read that reads so many of the last committed tokens first, but no image.

        A draft must have read all before that. One that never catches up has a window without end.
        """
        return 0 if window == maxsize else max(self.images_end, self.length - window)

    @property
    def longest(self) -> int:
        """The most tokens that prompt and output can have together."""
        return len(self.prompt) + self.params.max_new_tokens

    @property
    def most_entries(self) -> int:
        """The most entries that it may have in a cache: beams may have no token in common, and read widely."""
        beams = self.params.num_beams
        return len(self.prompt) + beams * self.params.max_new_tokens + (WIDEST_STEP if beams > 1 else 0)

    @property
    def remaining(self) -> int:
        """The most tokens that may still come."""
        return self.params.max_new_tokens - len(self.token_ids)

    @property
    def unscored(self) -> int:
        """The number of prompt tokens that still need the log-probabilities that were asked for."""
        return 0 if self.params.prompt_logprobs is None else len(self.prompt) - len(self.prompt_logprobs)

    @property
    def noise_seed(self) -> int:
        """The seed of the uniforms that draw and test proposals, another for each prediction.

        A prediction may be what the same seed has said before, and the noise that made a text must not judge it.
        """
        if not self.prediction or not self.params.draft_decides:
            return self.seed
        words = (self.seed, *self.prediction)
        return int.from_bytes(sha256(b"".join(word.to_bytes(8, "little") for word in words)).digest()[:8], "little")

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end, while another thread steps; return False if it takes longer than `timeout` seconds."""
        return self._ended.wait(timeout)

    def take(self) -> list[Piece]:
        """Return the pieces that have come out since the last call."""
        pieces = []
        while self._pieces:
            pieces.append(self._pieces.popleft())
        return pieces

    @property
    def _stopped_by(self) -> str | int | None:
        if self.finish_reason != "stop":
            return None
        return self._text.stopped_by or (self.token_ids[-1] if self.token_ids else None)

    def output(self) -> Output:
        """Return what has come out so far, final once `finished`; raise the error of a request that failed."""
        if self.error is not None:
            raise type(self.error)(str(self.error)) from self.error
        return Output(
            text=self._text.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason or "cancelled",
            stopped_by=self._stopped_by,
            usage=Usage(len(self.prompt), len(self.token_ids), self.cached_tokens),
            logprobs=None if self.params.logprobs is None else tuple(self._logprobs),
            prompt_logprobs=None if self.params.prompt_logprobs is None else tuple(self.prompt_logprobs),
            speculation=self.speculation,
            lossless=not self.params.lenient,
            seed=self.seed,
            seconds=(self._last_token or perf_counter()) - self._submitted,
            seconds_waiting=None if self._admitted is None else self._admitted - self._submitted,
            seconds_to_first_token=None if self._first_token is None else self._first_token - self._submitted,
            trace=tuple(self.trace or ()),
            beams=self.beams,
        )

    # Calls by the scheduler.

    def commit(self, tokens: Sequence[int], accepted: int, logprobs: Sequence[TokenLogprob]) -> int:
        """Append a round's tokens up to the first stop rule; return how many were kept."""
        self._first_token = self._first_token or perf_counter()
        kept, reason, text = 0, None, self._text
        allowed = len(tokens) if self.guide is None else self.guide.follow(tokens)
        for token in tokens[:allowed]:
            kept += 1
            self.token_ids.append(token)
            if token in self.stop_ids or text.push(token):
                reason = "stop"
            elif len(self.token_ids) == self.params.max_new_tokens:
                reason = "length"
            if reason is not None:
                break
        own: tuple[TokenLogprob, ...] = ()
        if (top := self.params.logprobs) is not None:
            own = tuple(replace(one, top=one.top[:top]) for one in logprobs[:kept])
            self._logprobs += own
        drafted = min(kept, accepted)
        from_draft = (True,) * drafted + (False,) * (kept - drafted)
        if reason is None:
            self._pieces.append(Piece(text.take(), tuple(tokens[:kept]), from_draft, own, text.settled))
        else:
            self.finish(reason, Piece("", tuple(tokens[:kept]), from_draft, own))
        if self.guide is not None and self.guide.error:
            after = counted(len(self.token_ids), "token")
            self.fail(RequestError(f"the grammar cannot go on after {after} ({self.guide.error}); change it"))
        return kept

    def end_search(self, found: Sequence[tuple[Sequence[int], float]]) -> None:
        """End a beam search with the tokens of its texts and their scores, the best first."""
        streams = [self._text, *(self._text.another() for _ in found[1:])]
        texts = []
        for stream, (tokens, score) in zip(streams, found, strict=True):
            stops = tokens[-1] in self.stop_ids
            for token in tokens[: len(tokens) - stops]:
                stream.push(token)
            stream.finish()
            texts.append(BeamText(stream.text, tuple(tokens), score, "stop" if stops else "length"))
        self._first_token, self.token_ids, self.beams = perf_counter(), list(found[0][0]), tuple(texts)
        self.finish(texts[0].finish_reason, Piece("", texts[0].token_ids, (False,) * len(self.token_ids)))

    def finish(self, reason: str, last: Piece = NOTHING) -> None:
        """End with a last piece: its tokens and all text that was held back."""
        if self._text.finish() and reason == "length":
            reason = "stop"
        text = self._text.take(everything=True)
        if text or last.token_ids:
            self._pieces.append(replace(last, text=text))
        self.finish_reason, self._last_token, self.guide = reason, perf_counter(), None
        self.state = State.FINISHED  # set last, because other threads watch it
        self._ended.set()

    def fail(self, error: BaseException) -> None:
        """End with an error, which `output` raises for the request's owner."""
        if isinstance(error, TrtSpecError):
            self.error = error
        else:
            self.error = EngineError(
                f"a round failed ({type(error).__name__}: {first_line(error)}) after {len(self.token_ids)} "
                "tokens of this request; submit it again"
            )
            self.error.__cause__ = error
        self.finish("error")

    def report(self) -> None:
        """Report progress to the owner; an error in the owner's callback ends this request and no other."""
        if self._on_progress is not None:
            try:
                self._on_progress(self)
            except Exception as error:  # a service's callback may raise anything
                if not self.finished:
                    self.fail(RequestError(f"on_progress raised {type(error).__name__}: {first_line(error)}; fix it"))


@contextmanager
def failing(request: Request) -> Iterator[None]:
    """Let what is wrong with one request end it alone."""
    try:
        yield
    except RequestError as error:
        request.fail(error)
