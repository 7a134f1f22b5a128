"""Formats, predictions and what requests leave to others, as clients of OpenAI's API ask for them."""

import json
from collections.abc import Iterator

import openai
import pytest
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.serving.tool_calls import CallReader

from ...bundles import Pair, tiny_pair
from ...models import tiny_llama
from .conftest import Served, serving

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "seed": 3, "max_completion_tokens": 60}
SCHEMA = {"type": "object", "properties": {"n": {"enum": ["a", "b"]}}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def signs(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A pair whose vocabulary has braces and quotes."""
    return tiny_pair(tiny_llama, tmp_path_factory.mktemp("signs"), noise=0.05, vocab=300)


@pytest.fixture(scope="module")
def server(signs: Pair) -> Iterator[Served]:
    with serving(signs, prefix_bytes=2**22) as server:
        yield server


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_the_schema_that_was_asked_for(server: Served, stream: bool):
    answer = server.openai.chat.completions.create(**ASK, response_format=FORMAT, stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        text, reason = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert json.loads(text)["n"] in ("a", "b")
    assert reason == "stop"


def test_plain_text_is_a_format_too(server: Served):
    texts = [
        server.openai.chat.completions.create(**ASK, **fields).choices[0].message.content
        for fields in ({}, {"response_format": {"type": "text"}})
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"type": "yaml"}, "response_format's type is 'yaml'"),
        ({"type": "json_schema"}, "json_schema is None, expected an object"),
        ({"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}, "the grammar cannot be compiled"),
    ],
)
def test_a_format_that_means_nothing_is_refused_by_name(server: Served, asked: dict, said: str):
    with pytest.raises(openai.BadRequestError, match=said) as error:
        server.openai.chat.completions.create(**ASK, response_format=asked)
    assert error.value.param == "response_format"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prediction_is_copied_and_counted(server: Served, signs: Pair, stream: bool):
    with Decoder.open(signs.bundle) as alone:
        [expected] = alone.generate("abc", SamplingParams(max_new_tokens=60, ignore_eos=True), draft_length=0)
    asked = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 60, "stream": stream}
    more = {"ignore_eos": True, "prediction": {"type": "content", "content": expected.text}, "speculation": True}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    answer = server.openai.completions.create(**asked, extra_body=more)
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected.text
    details = chunks[-1].usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 20
    [counts] = [one.speculation for chunk in chunks for one in chunk.choices if hasattr(one, "speculation")]
    assert details.accepted_prediction_tokens == counts["accepted"]
    assert details.rejected_prediction_tokens == counts["proposed"] - counts["accepted"]
    [plain] = [server.openai.completions.create(**asked | {"stream": False, "stream_options": None})]
    assert plain.usage.completion_tokens_details is None


def test_what_a_request_leaves_is_found_by_those_of_its_salt(server: Served):
    asked = {"model": "tiny", "prompt": "abcdefgh" * 12, "max_tokens": 3}
    cached = [
        server.openai.completions.create(**asked, extra_body={"cache_salt": salt}).usage.prompt_tokens_details
        for salt in ("one", "one", "two")
    ]
    assert [found.cached_tokens for found in cached][0::2] == [0, 0]
    assert cached[1].cached_tokens > 0
    lines = server.http.get("/metrics").text.splitlines()
    hits = next(line for line in lines if line.startswith("vllm:prefix_cache_hits_total{"))
    assert float(hits.split()[-1]) == cached[1].cached_tokens


TOOLS = [
    {"type": "function", "function": {"name": name, "description": "does it", "parameters": SCHEMA}}
    for name in ("add", "take_away")
]


def called(answer, stream: bool) -> tuple[str, str, str]:
    """Name, arguments and finish reason of the one call."""
    if not stream:
        [choice] = answer.choices
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        return call.function.name, call.function.arguments, choice.finish_reason
    choices = [chunk.choices[0] for chunk in answer]
    assert not any(choice.delta.content for choice in choices)
    deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert {delta.index for delta in deltas} == {0}
    assert deltas[0].id.startswith("call_")
    assert all(delta.id is None for delta in deltas[1:])
    return deltas[0].function.name, "".join(one.function.arguments for one in deltas), choices[-1].finish_reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "take_away"}}])
def test_a_tool_is_called_as_its_schema_says(server: Served, choice: object, stream: bool):
    answer = server.openai.chat.completions.create(**ASK, tools=TOOLS, tool_choice=choice, stream=stream)
    name, arguments, reason = called(answer, stream)
    assert name in (("add", "take_away") if choice == "required" else ("take_away",))
    assert json.loads(arguments)["n"] in ("a", "b")
    assert reason == "tool_calls"


def test_with_no_choice_the_answer_is_text(server: Served):
    answer = server.openai.chat.completions.create(**ASK, tools=TOOLS, tool_choice="none").choices[0]
    assert (answer.message.content is None, answer.message.tool_calls) == (False, None)


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"tools": TOOLS}, "tool_choice", "tool_choice is auto"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "names 'x'"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": FORMAT}, "response_format", "send one"),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused_by_name(server: Served, asked: dict, param: str, said: str):
    with pytest.raises(openai.BadRequestError, match=said) as error:
        server.openai.chat.completions.create(**ASK, **asked)
    assert error.value.param == param


def test_calls_and_their_results_reach_the_template(signs: Pair):
    """Arguments as an object, since templates write them out themselves."""
    template = (
        "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
        "{% for m in messages %}{{ m.role }}={{ m.content }}"
        "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments.n }}){% endfor %}"
        "{{ m.tool_call_id }}|{% endfor %}"
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"n": "a"}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "call_1"},
    ]
    with serving(signs, template=template) as server:
        found = server.post("/tokenize", {"messages": messages, "return_token_strs": True}).json()
        assert "".join(found["token_strs"]) == "user=x|assistant=add(a)|tool=3call_1|"
        answer = server.openai.chat.completions.create(
            model="tiny", messages=messages, tools=TOOLS, tool_choice="required", max_completion_tokens=40
        )
        written = "add;take_away;user=x|assistant=add(a)|tool=3call_1|"
        assert answer.usage.prompt_tokens == len(server.decoder.tokenizer.encode(written).ids)


def test_a_call_comes_piece_by_piece_and_is_whole_without_its_brace():
    reader, text = CallReader(["add", "address"]), '{"name": "address", "arguments": {"n": {}}}'
    deltas = [delta for letter in text for delta in reader.feed(letter)] + reader.end(whole=True)
    assert deltas[0].function.name == "address"
    assert "".join(delta.function.arguments for delta in deltas) == '{"n": {}}'
    [cut] = CallReader(["add"]).read('{"name": "add", "arguments": {"n', whole=False)
    assert cut.function.arguments == '{"n'
    assert CallReader(["add"]).read('{"name": "a', whole=False) == []
