"""POST /v1/responses, by OpenAI's own client: the text is that of a chat, in the shapes and events of this API."""

import json

import openai
import pytest
from trt_spec.tools.serving.kept_answers import KeptAnswers

from ...kit.bundles import Pair
from ...kit.schemas import SCHEMA
from .conftest import Served, serving

ASK = {"model": "tiny", "input": "abc", "max_output_tokens": 60, "extra_body": {"seed": 3, "rule": "coupled"}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "max_completion_tokens": 60}
CHAT |= {"seed": 3, "rule": "coupled"}
TOOLS = [
    {"type": "function", "name": name, "description": "does it", "parameters": SCHEMA, "strict": True}
    for name in ("add", "take_away")
]
FORM = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}


def chat(server: Served, **fields: object) -> dict:
    answer = server.post("/v1/chat/completions", CHAT | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_response_says_what_a_chat_says(server: Served):
    answer, same = server.openai.responses.create(**ASK), chat(server)
    assert answer.output_text == same["choices"][0]["message"]["content"]
    assert (answer.object, answer.id[:5], answer.status) == ("response", "resp_", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"
    [message] = answer.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "incomplete")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (same["usage"]["prompt_tokens"], 60)
    assert (answer.store, answer.max_output_tokens, answer.temperature) == (False, 60, 1.0)


def test_an_input_is_counted_as_it_is_read(server: Served):
    counted = server.openai.responses.input_tokens.count(model="tiny", input="abc", instructions="be brief")
    answer = server.openai.responses.create(**ASK | {"instructions": "be brief"})
    assert counted.input_tokens == answer.usage.input_tokens > 0
    counted = server.post("/v1/chat/completions/input_tokens", CHAT)
    assert counted.json() == {"input_tokens": chat(server)["usage"]["prompt_tokens"]}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_stored_is_found_again_and_no_other(server: Served, stream: bool):
    made = server.openai.responses.create(**ASK, store=True, stream=stream)
    answer = list(made)[-1].response if stream else made
    assert answer.store
    assert server.openai.responses.retrieve(answer.id) == answer
    for other in (server.openai.responses.create(**ASK).id, "resp_none"):
        with pytest.raises(openai.NotFoundError, match="is not kept here; send store: true with its request"):
            server.openai.responses.retrieve(other)


def test_what_is_stored_is_found_with_its_own_key_alone(signs: Pair):
    with serving(signs, keys=["a", "b"]) as server:

        def ask(method: str, path: str, key: str, **fields: object) -> dict:
            answer = server.http.request(method, path, headers={"x-api-key": key}, **fields)
            return answer.json() | {"status_code": answer.status_code}

        kept = ask("POST", "/v1/responses", "a", json={"input": "abc", "max_output_tokens": 3, "store": True})
        assert ask("GET", f"/v1/responses/{kept['id']}", "a") == kept
        assert ask("GET", f"/v1/responses/{kept['id']}", "b")["status_code"] == 404


def test_what_is_stored_is_bounded():
    kept = KeptAnswers(most_bytes=100)
    for number in range(10):
        kept.keep("a", str(number), bytes(30))
    assert kept.held_bytes == 90
    assert [number for number in range(10) if kept.find("a", str(number))] == [7, 8, 9]


def test_what_one_key_stores_drives_out_nothing_of_another():
    kept = KeptAnswers(most_bytes=100)
    kept.keep("a", "first", bytes(45))
    for number in range(10):
        kept.keep("b", str(number), bytes(20))
    assert kept.find("a", "first") is not None
    assert [number for number in range(10) if kept.find("b", str(number))] == [8, 9]
    assert kept.held_bytes == 85


def test_a_stored_response_comes_whole_alone(server: Served):
    kept = server.openai.responses.create(**ASK, store=True)
    with pytest.raises(openai.BadRequestError, match="stream=true is refused: a stored response comes whole") as error:
        server.openai.responses.retrieve(kept.id, stream=True)
    assert error.value.param == "stream"
    assert server.openai.responses.retrieve(kept.id, stream=False) == server.openai.responses.retrieve(kept.id) == kept


def test_instructions_come_before_the_input(server: Served):
    asked = ASK | {"instructions": "be brief", "input": [{"role": "user", "content": "abc"}]}
    system = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "abc"}]
    expected = chat(server, messages=system)["choices"][0]["message"]["content"]
    assert server.openai.responses.create(**asked).output_text == expected


EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.incomplete",
]


def test_a_stream_has_every_event_in_order_and_ends_with_the_whole_answer(server: Served):
    events = list(server.openai.responses.create(**ASK, stream=True))
    kinds = [event.type for event in events]
    assert [kind for place, kind in enumerate(kinds) if kinds[place - 1 : place] != [kind]] == EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    whole = server.openai.responses.create(**ASK)
    last = events[-1].response
    assert last.output_text == whole.output_text
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert last.usage.output_tokens == whole.usage.output_tokens
    [done] = [event for event in events if event.type == "response.output_item.done"]
    assert done.item.id == last.output[0].id == events[2].item.id
    assert done.item.content[0].text == whole.output_text


def test_the_helper_of_the_client_follows_a_stream(server: Served):
    asked = ASK | {"text": FORM}
    with server.openai.responses.stream(**asked) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == server.openai.responses.create(**asked).output_text


@pytest.mark.parametrize("stream", [False, True])
def test_a_format_is_kept(server: Served, stream: bool):
    answer = server.openai.responses.create(**ASK, text=FORM, stream=stream)
    answer = list(answer)[-1].response if stream else answer
    assert json.loads(answer.output_text)["n"] in ("a", "b")
    assert (answer.status, answer.text.format.type) == ("completed", "json_schema")
    with pytest.raises(openai.BadRequestError, match="the JSON schema cannot be compiled") as error:
        server.openai.responses.create(**ASK, text={"format": FORM["format"] | {"schema": {"type": "strin"}}})
    assert error.value.param == "text.format"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice",
    [
        "required",
        {"type": "function", "name": "take_away"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "take_away"}]},
    ],
)
def test_a_tool_is_called_and_its_output_goes_back(server: Served, choice: object, stream: bool):
    answer = server.openai.responses.create(**ASK, tools=TOOLS, tool_choice=choice, stream=stream)
    if stream:
        events = list(answer)
        answer = events[-1].response
        deltas = [one.delta for one in events if one.type == "response.function_call_arguments.delta"]
        assert "".join(deltas) == answer.output[0].arguments
        assert [one.arguments for one in events if one.type.endswith("arguments.done")] == [answer.output[0].arguments]
    [call] = answer.output
    assert (call.type, call.status, answer.status) == ("function_call", "completed", "completed")
    assert call.name in (("add", "take_away") if choice == "required" else ("take_away",))
    assert json.loads(call.arguments)["n"] in ("a", "b")
    history = [{"role": "user", "content": "abc"}, *answer.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "3"})
    called = {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    messages = [
        {"role": "user", "content": "abc"},
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "3"},
    ]
    expected = chat(server, messages=messages)["choices"][0]["message"]["content"]
    assert server.openai.responses.create(**ASK | {"input": history}).output_text == expected


def test_what_was_answered_goes_back_as_it_came(server: Served):
    first = server.openai.responses.create(**ASK)
    items = [{"role": "user", "content": "abc"}, *(item.model_dump() for item in first.output)]
    items.append({"role": "user", "content": [{"type": "input_text", "text": "on"}]})
    messages = [
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "on"},
    ]
    expected = chat(server, messages=messages)["choices"][0]["message"]["content"]
    assert server.openai.responses.create(**ASK | {"input": items}).output_text == expected


def test_log_probs_are_those_of_a_chat(server: Served):
    include = ["message.output_text.logprobs"]
    answer = server.openai.responses.create(**ASK, include=include, top_logprobs=2)
    expected = chat(server, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    [text] = answer.output[0].content
    assert [one.logprob for one in text.logprobs] == [one["logprob"] for one in expected]
    assert {len(one.top_logprobs) for one in text.logprobs} == {2}
    events = list(server.openai.responses.create(**ASK, include=include, top_logprobs=2, stream=True))
    streamed = [one.logprob for one in events[-1].response.output[0].content[0].logprobs]
    assert streamed == [one["logprob"] for one in expected]


def test_obfuscation_is_added_where_it_is_asked_for(server: Served):
    events = server.openai.responses.create(**ASK, stream=True, stream_options={"include_obfuscation": True})
    texts = [event.obfuscation for event in events if event.type == "response.output_text.delta"]
    assert len(set(map(len, texts))) > 1


@pytest.mark.parametrize(
    ("asked", "param", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "input holds the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "input holds the whole conversation"),
        ({"background": True}, "background", "while its client waits"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "expected one of message"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]},
            "input",
            "the model reads text alone",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "file_1"}]}]},
            "input[0].content[0].file_id",
            "file_id is refused",
        ),
        ({"input": [{"role": "user", "content": "a", "x": 1}]}, "input[0].x", "not a field of this request"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"max_output_tokens": 100_000}, "input", "shorten either"),
        ({"max_output_tokens": 0}, "max_output_tokens", "refused"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "refused"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "refused"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format", "yaml"),
        ({"truncation": "auto"}, "truncation", "refused"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_name_here(server: Served, asked: dict, param: str, said: str):
    with pytest.raises(openai.BadRequestError, match=said) as error:
        server.openai.responses.create(**ASK | asked)
    assert error.value.param == param


def test_a_stream_that_breaks_ends_with_response_failed(signs: Pair):
    with serving(signs, max_batch=1, drain_seconds=0.2) as server:
        seen = []
        for event in server.openai.responses.create(**ASK | {"max_output_tokens": 100}, stream=True):
            if not seen:
                server.end()
            seen.append(event)
        if seen[-1].type != "response.incomplete":  # it was quicker than the drain
            assert seen[-1].type == "response.failed"
            assert seen[-1].response.error.code == "shutting_down"
