"""The decoder: submit, step, cancel, and their clients generate and stream."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Self

import torch
from tokenizers import Tokenizer

from ..engines import MAX_DRAFT_LENGTH, Bundle, RequestError, open_engine
from .metrics import Speculation
from .model import PREFILL_WIDTH, Model
from .params import SamplingParams
from .request import Output, Piece, Request, State
from .result import RowResult, read_round
from .round import run_round
from .rows import Plan, Rows
from .text import TextStream

DEFAULT_DRAFT_LENGTH = 4
SLACK = max(2 * MAX_DRAFT_LENGTH + 2, PREFILL_WIDTH)  # what a call may write past the longest sequence

Prompt = str | Sequence[int]


class Decoder:
    """Decodes many requests together, one round at a time.

    `submit` and `cancel` may be called from any thread; one thread at a time is inside `step`.
    """

    def __init__(self, bundle: Bundle, engine: str, device: str, max_batch: int) -> None:
        if type(max_batch) is not int or max_batch < 1:
            raise RequestError(f"max_batch is {max_batch!r}, expected a whole number >= 1")
        self.bundle = bundle
        self.max_batch = max_batch
        self.vocab_size = bundle.tokenizer.vocab_size
        self.speculation = Speculation()
        self.tokenizer = Tokenizer.from_file(str(bundle.tokenizer_file))
        capacity = bundle.max_length + SLACK

        def model(role: str, contract: Any) -> Model:
            opened = open_engine(engine, bundle.graph(role), contract, device)
            return Model(opened, self.vocab_size, max_batch, capacity)

        self.target = model("target", bundle.target.contract)
        self.draft = None if bundle.draft is None else model("draft", bundle.draft.contract)
        self._rows = Rows.allocate(max_batch, capacity, device)
        self._live: list[Request] = []  # request i decodes in row i
        self._prefilling: Request | None = None  # in the row after the live ones
        self._waiting: deque[Request] = deque()
        self._plan: Plan | None = None
        self._plan_key: tuple[tuple[int, str], ...] = ()
        self._queue_lock = threading.Lock()
        self._step_lock = threading.RLock()
        self._closed = False

    @classmethod
    def open(
        cls, bundle: Path | str | Bundle, engine: str = "onnxruntime", device: str = "cpu", max_batch: int = 8
    ) -> Self:
        """Verify a bundle and open its graphs in an engine."""
        return cls(bundle if isinstance(bundle, Bundle) else Bundle.open(bundle), engine, device, max_batch)

    def close(self) -> None:
        with self._step_lock:
            self._abort()
            self._closed = True
            for model in (self.target, self.draft):
                if model is not None:
                    model.engine.close()

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
        draft_length: int = DEFAULT_DRAFT_LENGTH,
        drafter: str | None = None,
        trace: bool = False,
    ) -> list[Output]:
        """Complete prompts (text or token ids) together; the outputs come in the order of the prompts."""
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        each: Sequence[Any] = [prompts] if single else prompts
        settings = [params] * len(each) if params is None or isinstance(params, SamplingParams) else params
        if len(settings) != len(each):
            raise RequestError(
                f"there are {len(settings)} SamplingParams for {len(each)} prompts, expected one each"
            )
        requests: list[Request] = []
        try:
            for prompt, setting in zip(each, settings, strict=True):
                requests.append(
                    self.submit(prompt, setting, draft_length=draft_length, drafter=drafter, trace=trace)
                )
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
        draft_length: int = DEFAULT_DRAFT_LENGTH,
        drafter: str | None = None,
    ) -> Iterator[Piece]:
        """Complete one prompt piece by piece; leaving the loop cancels the request."""
        request = self.submit(prompt, params, draft_length=draft_length, drafter=drafter)
        try:
            while not request.finished:
                self.step()
                yield from request.take()
        finally:
            self.cancel(request)

    # The core.

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        draft_length: int = DEFAULT_DRAFT_LENGTH,
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
        drafter = drafter or ("lookup" if self.draft is None else "model")
        if drafter == "model" and self.draft is None:
            raise RequestError(f"bundle {self.bundle.path} has no draft model; use drafter lookup or none")
        stop_ids = frozenset(params.stop_token_ids) | frozenset(
            () if params.ignore_eos else self.bundle.tokenizer.eos_token_ids
        )
        text = TextStream(self.tokenizer, ids, params.stop)
        request = Request(ids, params, draft_length, drafter, stop_ids, text, trace)
        with self._queue_lock:
            if self._closed:
                raise RequestError("the decoder is closed; open another")
            self._waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request; one that is live leaves in the next step. Ending a finished one does nothing."""
        with self._queue_lock:
            if request in self._waiting:
                self._waiting.remove(request)
                request.finish("cancelled")
            request.cancelled = True

    def step(self) -> bool:
        """Admit and prefill what fits, run one round for all live requests; False when nothing is left to do."""
        with self._step_lock, torch.inference_mode():
            if self._closed:
                raise RequestError("the decoder is closed; open another")
            try:
                began = perf_counter()
                self._leave()
                self._prefill(PREFILL_WIDTH)
                if self._live:
                    self._round(began)
            except BaseException:
                self._abort()  # no row may be left half advanced
                raise
            return bool(self._live or self._prefilling or self._waiting)

    def _encode(self, prompt: Prompt) -> list[int]:
        ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        for token in ids:
            self._require_token(token, "prompt")
        return ids

    def _require_token(self, token: int, where: str) -> None:
        if type(token) is not int or not 0 <= token < self.vocab_size:
            raise RequestError(
                f"{where} token id {token!r} is outside the vocabulary of {self.vocab_size} tokens"
            )

    # Rows: live ones are dense, the one being prefilled follows them.

    def _leave(self) -> None:
        """Give up the rows of requests that have ended; the last live row takes each freed place."""
        if self._prefilling is not None and self._prefilling.cancelled:
            self._prefilling.finish("cancelled")
            self._prefilling = None
        for row in reversed(range(len(self._live))):
            request = self._live[row]
            if request.cancelled and not request.finished:
                request.finish("cancelled")
            if request.finished:
                self._plan = None
                last = self._live.pop()
                if row < len(self._live):
                    self._live[row] = last
                    self._move(last, len(self._live), row)
                if self._prefilling is not None:
                    self._move(self._prefilling, len(self._live) + 1, len(self._live))

    def _move(self, request: Request, source: int, destination: int) -> None:
        self._rows.move(source, destination)
        self.target.cache.move(source, destination, request.target_entries)
        if self.draft is not None:
            self.draft.cache.move(source, destination, request.draft_entries)

    def _prefill(self, budget: int) -> None:
        """Feed prompts to the models, at most `budget` tokens, so that live rows never wait for a long prompt."""
        while budget > 0:
            if self._prefilling is None and not self._admit():
                return
            request = self._prefilling
            assert request is not None
            row = len(self._live)
            wanted_by_target = len(request.prompt) - 1
            wanted_by_draft = len(request.prompt) - 2 if request.drafter == "model" else 0
            if request.target_entries < wanted_by_target:
                chunk = min(budget, wanted_by_target - request.target_entries)
                self._feed(self.target, row, request.target_entries, chunk)
                request.target_entries += chunk
            elif self.draft is not None and request.draft_entries < wanted_by_draft:
                chunk = min(budget, wanted_by_draft - request.draft_entries)
                self._feed(self.draft, row, request.draft_entries, chunk)
                request.draft_entries += chunk
            else:
                request.state = State.LIVE
                self._live.append(request)
                self._prefilling, self._plan = None, None
                continue
            budget -= chunk

    def _admit(self) -> bool:
        with self._queue_lock:
            if not self._waiting or len(self._live) == self.max_batch:
                return False
            request = self._waiting.popleft()
            self._prefilling = request
        request.state = State.PREFILLING
        self._rows.admit(len(self._live), list(request.prompt), request.params, request.seed, self.vocab_size)
        return True

    def _feed(self, model: Model, row: int, start: int, count: int) -> None:
        """Write `count` cache entries of a row from its committed tokens."""
        self._make_room(model, row + 1, start + count)
        model.prefill(row, self._rows.tokens[row, start : start + count], start)

    def _make_room(self, model: Model, rows: int, capacity: int) -> None:
        occupants = [*self._live, *([self._prefilling] if self._prefilling else [])]
        is_target = model is self.target
        kept = {row: r.target_entries if is_target else r.draft_entries for row, r in enumerate(occupants)}
        kept = {row: entries for row, entries in kept.items() if entries}
        model.make_room(max(rows, len(occupants)), max([capacity, *kept.values()]), kept)

    # A round.

    def _round(self, began: float) -> None:
        plan = self._current_plan()
        span = max(request.length for request in self._live)
        self._make_room(self.target, plan.batch, span + plan.draft_length + 1)
        if plan.model:
            assert self.draft is not None
            self._make_room(self.draft, plan.batch, span + plan.draft_length + 1)
            for row, request in enumerate(self._live):
                if request.drafter == "model":
                    self._catch_up(self.draft, row, request)
        done = run_round(self._rows.view(plan.batch), plan, self.draft, self.target, span)
        results = read_round(done, plan)
        for request, result in zip(self._live, results, strict=True):
            self._commit(request, result, plan)
        start, drafted, verified, accepted = done.marks
        host = (start - began) + (perf_counter() - accepted)
        times = [1e3 * t for t in (drafted - start, verified - drafted, accepted - verified, host)]
        for speculation in (self.speculation, *(request.speculation for request in self._live)):
            speculation.add_times(*times)
        self._leave()

    def _catch_up(self, draft: Model, row: int, request: Request) -> None:
        """The draft's first step sees the last two tokens; it must have seen all before them."""
        missing = request.length - 2 - request.draft_entries
        while missing > 0:
            chunk = min(missing, PREFILL_WIDTH)
            self._feed(draft, row, request.draft_entries, chunk)
            request.draft_entries += chunk
            missing -= chunk

    def _commit(self, request: Request, result: RowResult, plan: Plan) -> None:
        before = request.length
        kept = request.commit(result.tokens, result.accepted, result.logprobs)
        if request.drafter == "model" and plan.draft_length and before > 1:
            request.draft_entries = before + min(result.accepted, plan.draft_length - 1)
        request.target_entries = before + result.accepted
        for speculation in (self.speculation, request.speculation):
            speculation.add_round(result.proposed, result.accepted, kept)
        if request.trace is not None and result.trace is not None:
            ended_early = kept <= result.accepted
            request.trace.append(
                replace(result.trace, accepted=kept, next_token=None) if ended_early else result.trace
            )

    def _current_plan(self) -> Plan:
        key = tuple((self._draft_length(request), request.drafter) for request in self._live)
        if self._plan is None or key != self._plan_key:
            self._plan_key, self._plan = key, self._make_plan(key)
        return self._plan

    def _draft_length(self, request: Request) -> int:
        """Proposals a row takes this round; the draft cannot begin before there are two tokens."""
        if request.drafter == "none" or (request.drafter == "model" and request.length < 2):
            return 0
        return request.draft_length

    def _make_plan(self, key: tuple[tuple[int, str], ...]) -> Plan:
        batch = len(self._live)
        lengths = [length for length, _ in key]
        self._rows.draft_length[:batch] = torch.tensor(lengths)
        self._rows.use_model[:batch] = torch.tensor([name == "model" for _, name in key])
        self._rows.use_lookup[:batch] = torch.tensor([name == "lookup" for _, name in key])

        def any_row(holds: Callable[[SamplingParams], bool]) -> bool:
            return any(holds(request.params) for request in self._live)

        logprobs = [p for request in self._live if (p := request.params.logprobs) is not None]
        return Plan(
            batch=batch,
            draft_length=max(lengths),
            model=any(length and name == "model" for length, name in key),
            lookup=any(length and name == "lookup" for length, name in key),
            sampled=any_row(lambda p: not p.greedy),
            rejection=any_row(lambda p: not p.greedy and p.rule == "rejection"),
            gumbel=any_row(lambda p: not p.greedy and p.rule == "coupled"),
            filtered=any_row(lambda p: not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)),
            penalised=any_row(lambda p: p.penalised),
            biased=any_row(lambda p: bool(p.logit_bias)),
            logprobs=max(logprobs, default=None),
            traced=any(request.trace is not None for request in self._live),
        )

    def _abort(self) -> None:
        """End every request; the next one starts on clean rows."""
        occupants = [*self._live, *([self._prefilling] if self._prefilling else [])]
        with self._queue_lock:
            occupants += self._waiting
            self._waiting.clear()
        for request in occupants:
            if not request.finished:
                request.finish("cancelled")
        self._live.clear()
        self._prefilling, self._plan = None, None
