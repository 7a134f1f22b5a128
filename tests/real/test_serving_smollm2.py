"""A published chat model behind the server: its own template, tools, schemas, with and without speculation."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep

import openai
import pytest

from .chats import QUESTIONS
from .conftest import NEW_TOKENS, ROOT, Reference, environment

pytestmark = [pytest.mark.real, pytest.mark.xdist_group("real")]
GREEDY = {"model": "smollm2", "temperature": 0, "max_completion_tokens": NEW_TOKENS}
PLAIN = {"draft_length": 0}
COPIES = [{"drafter": "lookup", "draft_length": 4}, {"drafter": "suffix", "draft_length": 8}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 30}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(
    exported: Callable[..., tuple[Path, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    bundle, _ = exported("none")
    flags = ("--bundle", bundle, "--port", 0, "--served-model-name", "smollm2", "--max-batch", 4)
    log = tmp_path_factory.mktemp("serving") / "log"
    with log.open("wb") as written:
        asked = [sys.executable, "-m", "trt_spec.tools.cli", "serve", *map(str, flags)]
        server = subprocess.Popen(asked, stdout=written, stderr=written, cwd=ROOT, env=environment())
    try:
        while (at := re.search(r"at (http://\S+)", log.read_text())) is None:
            assert server.poll() is None, log.read_text()
            sleep(0.1)
        with openai.OpenAI(base_url=f"{at[1]}/v1", api_key="none", max_retries=0, timeout=600) as opened:
            yield opened
    finally:
        server.terminate()
        assert server.wait(60) == 0


def asked(client: openai.OpenAI, question: str, **fields: object):
    given = GREEDY | {"messages": [{"role": "user", "content": question}], "extra_body": PLAIN} | fields
    [choice] = client.chat.completions.create(**given).choices
    return choice


def test_its_chats_say_what_transformers_says_by_its_own_template(client: openai.OpenAI, reference: Reference):
    for question in QUESTIONS:
        assert asked(client, question).message.content == reference.text(question)


def test_a_stream_says_the_same_and_speculation_says_the_same(client: openai.OpenAI, reference: Reference):
    for question in QUESTIONS[:5]:
        for body in COPIES:
            messages = [{"role": "user", "content": question}]
            stream = client.chat.completions.create(**GREEDY, messages=messages, stream=True, extra_body=body)
            said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            assert said == reference.text(question)


def test_sampled_answers_are_the_same_with_copies_under_rule_coupled(client: openai.OpenAI):
    for seed in range(3):
        said = {
            asked(client, QUESTIONS[6], temperature=1, seed=seed, extra_body=body | {"rule": "coupled"}).message.content
            for body in (PLAIN, *COPIES)
        }
        assert len(said) == 1


@pytest.mark.parametrize("body", [PLAIN, *COPIES], ids=["plain", "lookup", "suffix"])
def test_a_tool_is_called_with_arguments_that_fit_its_schema(client: openai.OpenAI, body: dict):
    choice = asked(client, "What is the weather in Paris?", tools=[WEATHER], tool_choice="required", extra_body=body)
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert set(arguments) == {"city", "unit"}
    assert len(arguments["city"]) <= 30
    assert arguments["unit"] in ("celsius", "fahrenheit")


def test_an_object_has_its_schema_whatever_proposes(client: openai.OpenAI):
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    question = "Albert Einstein was 26 years old in 1905. Give his name and his age then as JSON."
    said = [asked(client, question, response_format=form, extra_body=body) for body in (PLAIN, *COPIES)]
    assert {choice.finish_reason for choice in said} == {"stop"}
    [text] = {choice.message.content for choice in said}
    found = json.loads(text)
    assert set(found) == {"name", "age"}
    assert 0 <= found["age"] <= 150
