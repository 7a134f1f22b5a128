"""What a stream sends, message by message, as the server below it sees them."""

import asyncio
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace

import pytest
from trt_spec.runtime import Output, Piece, Speculation, Usage
from trt_spec.tools.serving.answers import AnyChoice
from trt_spec.tools.serving.bodies import CompletionBody, StreamOptions
from trt_spec.tools.serving.choices import ChoiceWriter
from trt_spec.tools.serving.delivery import Stream, total_usage


class ScriptedGroup:
    """One request's news, round by round; the last round ends it."""

    def __init__(self, rounds: Sequence[Sequence[Piece]]) -> None:
        self.requests = [SimpleNamespace(prediction=(), prompt_logprobs=())]
        self.tickets = [SimpleNamespace(request=request) for request in self.requests]
        self._rounds = list(rounds)

    async def progress(self) -> list[tuple[int, Sequence[Piece], bool]]:
        pieces = self._rounds.pop(0)
        return [(0, pieces, not self._rounds)]

    def output(self, index: int) -> Output:
        return Output(
            text="",
            token_ids=(),
            finish_reason="length",
            stopped_by=None,
            usage=Usage(2, 3, 0),
            logprobs=None,
            prompt_logprobs=None,
            speculation=Speculation(),
            lossless=True,
            seed=0,
            seconds=1.0,
            seconds_waiting=0.0,
            seconds_to_first_token=0.5,
            trace=(),
        )

    def wake(self) -> None: ...

    def cancel(self) -> None: ...


class ScriptedWriter(ChoiceWriter[AnyChoice, AnyChoice]):
    """Shows the tokens of each piece."""

    def __init__(self, opens: bool, include_usage: bool = False) -> None:
        service = SimpleNamespace(name="model", fingerprint="print", spelling=None)
        body = CompletionBody(prompt="", stream=True, stream_options=StreamOptions(include_usage=include_usage))
        super().__init__(service, body, "name", "kind", "kind")
        self._opens = opens

    def choice(self, index: int, output: Output) -> AnyChoice:
        raise NotImplementedError

    def first(self, index: int, request: object) -> AnyChoice | None:
        return AnyChoice(index=index) if self._opens else None

    def next(self, index: int, pieces: Sequence[Piece], request: object) -> AnyChoice:
        return AnyChoice(index=index, token_ids=[token for piece in pieces for token in piece.token_ids])

    def last(self, index: int, output: Output) -> AnyChoice:
        return AnyChoice(index=index, finish_reason="length")


def sent_by(group: ScriptedGroup, writer: ScriptedWriter) -> list[dict]:
    """Send a whole stream to a client that stays, and return the messages."""
    metrics = SimpleNamespace(between_chunks=SimpleNamespace(observe=lambda seconds: None))
    service = SimpleNamespace(keep_alive_seconds=60, metrics=metrics)
    messages: list[dict] = []

    async def receive() -> dict:
        await asyncio.Event().wait()
        return {}

    async def send(message: dict) -> None:
        messages.append(message)

    usage_of = partial(total_usage, group, 1, False)
    asyncio.run(Stream(service, group, writer, usage_of)({"type": "http"}, receive, send))
    return messages


PIECES = [[Piece("a", (1,), (True,))], [], [Piece("b", (2, 3), (True, False))]]


@pytest.mark.parametrize("include_usage", [False, True])
def test_the_end_of_a_stream_goes_out_with_its_last_chunk_and_rounds_without_news_send_nothing(include_usage: bool):
    start, *parts = sent_by(ScriptedGroup(PIECES), ScriptedWriter(False, include_usage))
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert [part["more_body"] for part in parts] == [True, False]
    first, last = (part["body"].decode().split("\n\n") for part in parts)
    assert [line.partition('"choices":')[2] for line in first] == [
        '[{"index":0,"finish_reason":null,"token_ids":[1]}]' + (',"usage":null}' if include_usage else "}"),
        "",
    ]
    assert '"token_ids":[2,3]' in last[0]
    assert '"finish_reason":"length"' in last[1]
    assert ['"total_tokens":5' in line for line in last[2:]] == [True, False, False][not include_usage :]
    assert last[-2:] == ["data: [DONE]", ""]


def test_what_opens_a_stream_goes_out_before_any_news():
    _, opening, *_ = sent_by(ScriptedGroup(PIECES), ScriptedWriter(True))
    assert opening["body"].count(b"data: ") == 1
    assert b"token_ids" not in opening["body"]


def test_an_error_in_mid_stream_is_the_last_that_is_sent():
    group = ScriptedGroup(PIECES)
    group.output = lambda index: 1 // 0
    *_, chunk, last = sent_by(group, ScriptedWriter(False))
    assert (chunk["more_body"], last["more_body"]) == (True, False)
    piece, error, rest = last["body"].decode().split("\n\n")
    assert '"token_ids":[2,3]' in piece, "what came before it is not lost"
    assert error.startswith('data: {"error":')
    assert rest == ""
