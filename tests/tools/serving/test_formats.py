"""Formats, predictions and what requests leave to others, as clients of OpenAI's API ask for them."""

import json

import openai
import pytest
from trt_spec.runtime import Decoder, SamplingParams

from ...kit.bundles import Pair
from ...kit.schemas import FORMAT
from .conftest import Served

ASK = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "seed": 3, "max_completion_tokens": 60}


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
        ({"type": "json_schema", "json_schema": {"schema": {"type": "strin"}}}, "the JSON schema cannot be compiled"),
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
