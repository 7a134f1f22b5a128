"""POST /v1/messages, by Anthropic's own client: the text is that of a chat, in the shapes and events of this API."""

import json
from collections.abc import Iterator

import anthropic
import pytest

from ...kit.bundles import Pair
from ...kit.schemas import SCHEMA
from .conftest import Served, serving

ASK = {"model": "tiny", "max_tokens": 60, "messages": [{"role": "user", "content": "abc"}]}
ASK |= {"extra_body": {"seed": 3, "rule": "coupled"}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "max_completion_tokens": 60}
CHAT |= {"seed": 3, "rule": "coupled"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
TOOLS = [{"name": name, "description": "does it", "input_schema": SCHEMA} for name in ("add", "take_away")]


@pytest.fixture
def client(server: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def chat(server: Served, **fields: object) -> dict:
    answer = server.post("/v1/chat/completions", CHAT | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def said(server: Served, messages: list[dict], **fields: object) -> str:
    return chat(server, messages=messages, **fields)["choices"][0]["message"]["content"]


def test_a_message_says_what_a_chat_says(server: Served, client: anthropic.Anthropic):
    answer, same = client.messages.create(**ASK), chat(server)
    [block] = answer.content
    assert (block.type, block.text) == ("text", same["choices"][0]["message"]["content"])
    assert (answer.type, answer.role, answer.id[:4]) == ("message", "assistant", "msg_")
    assert (answer.stop_reason, answer.stop_sequence) == ("max_tokens", None)
    usage = answer.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == same["usage"]["prompt_tokens"]
    assert usage.output_tokens == 60


def test_a_stream_has_every_event_in_order_and_adds_up_to_the_answer(client: anthropic.Anthropic):
    whole = client.messages.create(**ASK)
    kinds = [event.type for event in client.messages.create(**ASK, stream=True)]
    assert [kind for place, kind in enumerate(kinds) if kinds[place - 1 : place] != [kind]] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    with client.messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == whole.content[0].text
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 60)
    assert final.content[0].text == whole.content[0].text


def test_system_and_blocks_become_messages(server: Served, client: anthropic.Anthropic):
    blocks = [{"type": "text", "text": "ab"}, {"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}}]
    asked = ASK | {"system": [{"type": "text", "text": "be brief"}], "messages": [{"role": "user", "content": blocks}]}
    expected = said(server, [{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab\nc"}])
    assert client.messages.create(**asked).content[0].text == expected


def test_where_the_assistant_has_the_last_word_it_goes_on(server: Served, client: anthropic.Anthropic):
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "and so"}]
    answer = client.messages.create(**ASK | {"messages": messages})
    assert answer.content[0].text == said(server, messages, continue_final_message=True, add_generation_prompt=False)
    assert answer.content[0].text != said(server, messages)


def test_a_stop_sequence_is_named(server: Served, client: anthropic.Anthropic):
    text = client.messages.create(**ASK).content[0].text
    stop = text[5:7]
    answer = client.messages.create(**ASK, stop_sequences=["never", stop])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)
    assert answer.content[0].text == text[: text.index(stop)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "take_away"}])
def test_a_tool_is_used_and_its_result_goes_back(
    server: Served, client: anthropic.Anthropic, choice: dict, stream: bool
):
    if stream:
        with client.messages.stream(**ASK, tools=TOOLS, tool_choice=choice) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**ASK, tools=TOOLS, tool_choice=choice)
    [use] = answer.content
    assert (use.type, answer.stop_reason) == ("tool_use", "tool_use")
    assert use.name in (("add", "take_away") if choice["type"] == "any" else ("take_away",))
    assert use.input["n"] in ("a", "b")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "3"}]}
    history = [
        {"role": "user", "content": "abc"},
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result, {"type": "text", "text": "on"}]},
    ]
    function = {"name": use.name, "arguments": json.dumps(use.input)}
    messages = [
        {"role": "user", "content": "abc"},
        {"role": "assistant", "tool_calls": [{"id": use.id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": use.id, "content": "3"},
        {"role": "user", "content": "on"},
    ]
    assert client.messages.create(**ASK | {"messages": history}).content[0].text == said(server, messages)


def test_a_format_is_kept(client: anthropic.Anthropic):
    answer = client.messages.create(**ASK, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert json.loads(answer.content[0].text)["n"] in ("a", "b")
    assert answer.stop_reason == "end_turn"


def test_tokens_are_counted_as_they_are_read(client: anthropic.Anthropic):
    asked = {"model": "tiny", "system": "be brief", "messages": ASK["messages"]}
    counted = client.messages.count_tokens(**asked).input_tokens
    usage = client.messages.create(**ASK, system="be brief").usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize(
    ("asked", "status", "kind", "said"),
    [
        ({"model": "other"}, 404, "not_found_error", "model 'other' is not served here"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens is refused"),
        ({"max_tokens": 100_000}, 400, "invalid_request_error", "shorten either"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error", "reads text alone"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "there are no tools"),
        ({"tool_choice": {"type": "tool"}}, 400, "invalid_request_error", "names a tool if its type is tool"),
        ({"mcp_servers": []}, 400, "invalid_request_error", "tools are called by the client"),
        ({"system": "x" * 2**22}, 413, "request_too_large", "the body has more than"),
    ],
)
def test_refusals_have_the_shape_of_this_api(server: Served, asked: dict, status: int, kind: str, said: str):
    body = {name: value for name, value in ASK.items() if name != "extra_body"} | asked
    answer = server.post("/v1/messages", body)
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (status, "error", kind)
    assert said in answer.json()["error"]["message"]


def test_its_key_opens_and_a_wrong_one_does_not(signs: Pair):
    with serving(signs, keys=["right"]) as server:
        for key, opens in (("right", True), ("wrong", False)):
            with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
                if opens:
                    assert client.messages.create(**ASK).content
                else:
                    with pytest.raises(anthropic.AuthenticationError, match="a key that is not one of this server's"):
                        client.messages.create(**ASK)
