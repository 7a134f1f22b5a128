"""Open WebUI's requests, replayed: it was not installed, and its source says what its backend sends.

That is `routers/openai.py` of open-webui/open-webui at commit 0cc621a, with the parameters of `utils/payload.py`.
"""

import json

import httpx
import pytest

from ...kit.schemas import TOOLS
from .conftest import Served

HEADERS = {
    "Authorization": "Bearer none",
    "X-OpenWebUI-User-Name": "A%20User",
    "X-OpenWebUI-User-Id": "7a0e",
    "X-OpenWebUI-User-Email": "user@example.org",
    "X-OpenWebUI-User-Role": "admin",
    "X-OpenWebUI-Chat-Id": "c4f1",
}
TALK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "abc"}]
SEEN = [{"role": "user", "content": [{"type": "text", "text": "abc"}]}]
PARAMS = {"temperature": 0.8, "top_p": 0.9, "min_p": 0.05, "top_k": 40, "frequency_penalty": 0.5, "seed": 3}
PARAMS |= {
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "max_tokens": 60,
    "stop": ["zz"],
    "logit_bias": {"70": 2},
}
CUSTOM = {"rule": "coupled", "draft_length": 3, "chat_template_kwargs": {"enable_thinking": False}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"n": "a"}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "3"}
STREAM = {"stream": True, "model": "tiny", "stream_options": {"include_usage": True}}
STREAMED = {
    "a chat": {"messages": TALK},
    "a chat with parameters": {"messages": TALK} | PARAMS | CUSTOM,
    "parts of a message": {"messages": SEEN},
    "tools of its own": {"messages": TALK, "tools": TOOLS},
    "what they returned": {"messages": [*TALK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]},
    "a message to be continued": {
        "messages": [*TALK, {"role": "assistant", "content": "and so"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    },
}


def post(server: Served, path: str, body: dict) -> httpx.Response:
    answer = server.http.post(path, content=json.dumps(body), headers=HEADERS | {"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    return answer


def test_it_finds_the_model(server: Served):
    listed = server.http.get("/v1/models", headers=HEADERS).json()
    assert [(one["id"], one["object"]) for one in listed["data"]] == [("tiny", "model")]


@pytest.mark.parametrize("kind", STREAMED)
def test_its_stream_says_what_a_plain_request_says_and_ends_with_usage(server: Served, kind: str):
    body = {"max_tokens": 60, "seed": 3, "rule": "coupled"} | STREAMED[kind]
    answer = post(server, "/v1/chat/completions", STREAM | body)
    assert answer.headers["content-type"].startswith("text/event-stream")  # by this it tells a stream from an error
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    *chunks, last = map(json.loads, lines)
    same = server.post("/v1/chat/completions", body).json()
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert said == same["choices"][0]["message"]["content"]
    details = "prompt_tokens_details"  # says what an earlier request has left
    assert last["usage"] | {details: None} == same["usage"] | {details: None}


def test_its_titles_and_tags_come_whole(server: Served):
    body = {"model": "tiny", "stream": False, "max_tokens": 60, "seed": 3, "rule": "coupled"}
    body["messages"] = [{"role": "user", "content": "### Task:\nGenerate a title"}]
    [choice] = post(server, "/v1/chat/completions", body).json()["choices"]
    prompt = {"prompt": "u0### Task:\nGenerate a title1a0", "max_tokens": 60, "seed": 3, "rule": "coupled"}
    assert choice["message"]["content"] == server.post("/v1/completions", prompt).json()["choices"][0]["text"]


def test_its_responses_say_what_a_chat_says(server: Served):
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "abc"}]}
    body = {"stream": True, "model": "tiny", "input": [item], "instructions": "be brief", "max_output_tokens": 60}
    body |= {"temperature": 0.8, "top_p": 0.9, "seed": 3, "rule": "coupled"}
    body["tools"] = [{"type": "function", "strict": False} | tool["function"] for tool in TOOLS]
    answer = post(server, "/v1/responses", body)
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    sampling = {name: body[name] for name in ("temperature", "top_p", "seed", "rule")}
    same = server.post("/v1/chat/completions", {"messages": TALK, "max_tokens": 60} | sampling).json()
    assert said == same["choices"][0]["message"]["content"]
