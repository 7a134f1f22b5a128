"""POST /v1/completions: text or token ids go on, with a source if there is one, and are echoed if asked for."""

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from ...runtime import Output, Piece, Request, TokenLogprob
from .access_log import note_prompt
from .answers import CompletionChoice, CompletionLogprobs, FinishReason
from .bodies import CompletionBody
from .choices import ChoiceWriter, reason_of
from .delivery import delivery_of
from .errors import ApiError
from .formats import format_of
from .guard import caller_of
from .raw_bodies import body_of
from .service import Service
from .tokens import Offsets, completion_logprobs

DEFAULT_MAX_TOKENS = 16


class CompletionWriter(ChoiceWriter[CompletionChoice, CompletionChoice]):
    """Writes completions; `echoes` are the prompts' own texts, to be put before what they are continued by."""

    def __init__(
        self, service: Service, body: CompletionBody, echoes: Sequence[str], prompts: Sequence[Sequence[int]]
    ) -> None:
        super().__init__(service, body, "cmpl", "text_completion", "text_completion")
        self._body: CompletionBody = body
        self._echoes, self._prompts = echoes, prompts
        self._offsets: dict[int, Offsets] = {}
        self.reads_only = body.max_tokens == 0

    def choice(self, index: int, output: Output) -> CompletionChoice:
        tokens = () if self.reads_only else output.token_ids
        echo = self._echo(index)
        before = self._prompt(index) if output.prompt_logprobs is not None else ()
        logprobs = [*(output.prompt_logprobs or ()), *(output.logprobs or ())[: len(tokens)]]
        choice = CompletionChoice(
            index=index,
            text=echo + ("" if self.reads_only else output.text),
            finish_reason=self._reason(output),
            logprobs=self._logprobs(index, [*before, *tokens], logprobs),
        )
        if self._body.return_token_ids:
            choice.prompt_token_ids, choice.token_ids = list(self._prompt(index)), list(tokens)
        return choice

    def first(self, index: int, request: Request) -> CompletionChoice | None:
        echo = self._echo(index)
        shown = echo if self._body.logprobs is None else ""
        if self._body.return_token_ids:
            return CompletionChoice(index=index, text=shown, prompt_token_ids=list(self._prompt(index)), token_ids=[])
        return CompletionChoice(index=index, text=shown) if shown else None

    def next(self, index: int, pieces: Sequence[Piece], request: Request) -> CompletionChoice | None:
        text = "".join(piece.text for piece in pieces)
        tokens = [token for piece in pieces for token in piece.token_ids]
        logprobs: list[TokenLogprob | None] = [one for piece in pieces for one in piece.logprobs]
        if self.reads_only:
            text, tokens, logprobs = "", [], []
        written = tokens
        if self._body.echo and self._body.logprobs is not None and index not in self._offsets:  # known only now
            text = self._echo(index) + text
            tokens = [*request.prompt, *tokens]
            logprobs = [*request.prompt_logprobs, *logprobs]
        if not (text or logprobs or self._body.return_token_ids):
            return None
        choice = CompletionChoice(index=index, text=text, logprobs=self._logprobs(index, tokens, logprobs))
        if self._body.return_token_ids:
            choice.token_ids = written
        return choice

    def last(self, index: int, output: Output) -> CompletionChoice:
        return CompletionChoice(index=index, text="", finish_reason=self._reason(output))

    def _reason(self, output: Output) -> FinishReason:
        return "length" if self.reads_only else reason_of(output)

    def _prompt(self, index: int) -> Sequence[int]:
        return self._prompts[index // (self._body.n or 1)]

    def _echo(self, index: int) -> str:
        return self._echoes[index // (self._body.n or 1)] if self._body.echo else ""

    def _logprobs(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        offsets = self._offsets.setdefault(index, Offsets())
        return completion_logprobs(logprobs, tokens, self._spelling, offsets)


async def complete(request: HttpRequest) -> Response:
    service: Service = request.app.state.service
    body = await body_of(request, CompletionBody)
    service.require_model(body.model)
    prompts = prompts_of(body.prompt)
    service.stepper.refuse_if_full(len(prompts) * (body.n or 1))
    note_prompt(request.scope, body.prompt)
    source = None if body.source is None else await service.source(body.source)
    most = service.most_of(body)
    encoded = [await service.beginning(one, source, most) for one in prompts]
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if body.max_tokens is None:  # a default gives way to the prompt
        longest = max(map(len, encoded))
        max_tokens = max(1, min(max_tokens, service.max_length - longest))
    read = [service.truncated(one, body, max_tokens) for one in encoded]
    of_prompt = body.logprobs if body.echo else None
    wanted = await service.submissions(
        body,
        read,
        max_tokens,
        caller_of(request),
        format_of(body),
        source,
        logprobs=body.logprobs,
        prompt_logprobs=of_prompt,
    )
    group = service.stepper.submit(wanted, every_round=bool(body.stream))
    shown = prompts if body.truncate_prompt_tokens is None else read
    echoes = [text_of(one, service) for one in shown] if body.echo else []  # of tokens that the decoder has checked
    writer = CompletionWriter(service, body, echoes, read)
    return delivery_of(group, writer, service, stream=body.stream, each=body.n or 1, reads_only=writer.reads_only)


def text_of(prompt: str | list[int], service: Service) -> str:
    return prompt if isinstance(prompt, str) else str(service.decoder.tokenizer.decode(prompt))


def prompts_of(prompt: object) -> list[str | list[int]]:
    """One prompt or several: text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    assert isinstance(prompt, list)
    kinds = set(map(type, prompt))
    if len(kinds) > 1:
        raise ApiError(400, "prompt mixes text and token ids, expected a list of one kind", "prompt")
    if kinds == {int}:
        return [prompt]
    return prompt
