"""Clients that users have, as their registries ship them: each is told what a plain request is told."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ...kit.bundles import Pair
from ...kit.schemas import FORMAT, SCHEMA, TOOLS
from .clients.installed import HERE, environment, run
from .clients.versions import VERSIONS, requirements
from .conftest import Served, serving

pytestmark = [pytest.mark.clients, pytest.mark.long, pytest.mark.xdist_group("clients")]

ABC = {"role": "user", "content": "abc"}
ASK = {"model": "tiny", "messages": [ABC], "max_completion_tokens": 200, "seed": 3, "rule": "coupled"}


@pytest.fixture(scope="module")
def server(signs: Pair) -> Iterator[Served]:
    with serving(signs) as server:
        yield server


@pytest.fixture(scope="module")
def installed() -> Path:
    """The clients for Python, which share an environment because they fit together."""
    names = ("langchain-openai", "langchain-anthropic", "litellm", "instructor", "llm")
    return environment("clients", *requirements(*names))


def plain(server: Served, **fields: object) -> dict:
    answer = server.post("/v1/chat/completions", ASK | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(server: Served, **fields: object) -> str:
    return plain(server, **fields)["choices"][0]["message"]["content"]


def calls(server: Served, choice: str, tools: list[dict] = TOOLS) -> list:
    """Names and arguments of the calls that `choice` asks for: "required", or a tool's name."""
    named = {"type": "function", "function": {"name": choice}}
    answer = plain(server, tools=tools, tool_choice=choice if choice == "required" else named)
    made = [call["function"] for call in answer["choices"][0]["message"]["tool_calls"]]
    return [[call["name"], json.loads(call["arguments"])] for call in made]


def usage(server: Served) -> list[int]:
    used = plain(server)["usage"]
    return [used["prompt_tokens"], used["completion_tokens"]]


def test_langchain_is_told_what_a_plain_request_is_told(server: Served, installed: Path):
    seen = json.loads(run(installed / "python", HERE / "ask_langchain.py", server.url, folder=installed))
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    called = [
        ABC,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    talked = [ABC, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "on"}]
    expected = {
        "whole": text(server),
        "streamed": text(server),
        "usage": [usage(server)] * 2,
        "format": json.loads(text(server, response_format=FORMAT)),
        "any": calls(server, "required"),
        "named": calls(server, "take_away"),
        "named, streamed": calls(server, "take_away"),
        "result": text(server, messages=called),
        "on": text(server, messages=talked),
    }
    assert seen.pop("at once") == [text(server)] * 3
    assert seen == dict.fromkeys(("chat", "responses", "messages"), expected)


def test_litellm_is_told_what_a_plain_request_is_told(server: Served, installed: Path):
    command = [installed / "python", HERE / "ask_litellm.py", server.url, json.dumps(TOOLS), json.dumps(FORMAT)]
    seen = json.loads(run(*command, folder=installed).splitlines()[-1])
    expected = {
        "whole": text(server),
        "streamed": text(server),
        "usage": [usage(server)] * 2,
        "awaited": text(server),
        "format": json.loads(text(server, response_format=FORMAT)),
        "any": calls(server, "required"),
        "any, streamed": calls(server, "required"),
    }
    assert seen == {"openai": expected, "anthropic": expected, "refused": [400, True]}


def test_instructor_reads_the_objects_of_a_plain_request(server: Served, installed: Path):
    seen = json.loads(run(installed / "python", HERE / "ask_instructor.py", server.url, folder=installed))
    called = []
    for name in ("Answer", "PartialAnswer"):  # as it calls a tool whose object is shown while it is written
        [[_, arguments]] = calls(server, name, [{"type": "function", "function": {"name": name, "parameters": SCHEMA}}])
        called.append(arguments)
    answer = json.loads(text(server, response_format=FORMAT))
    assert seen == {"format": [answer] * 2, "tool": called, "messages": called, "response": called[0]}


MODELS = """
- {{model_id: tiny, model_name: tiny, api_base: "{url}/v1", supports_schema: true}}
- {{model_id: tiny-text, model_name: tiny, api_base: "{url}/v1", completion: true}}
"""


def test_llm_prints_what_a_plain_request_is_told(server: Served, installed: Path, tmp_path: Path):
    (tmp_path / "extra-openai-models.yaml").write_text(MODELS.format(url=server.url))
    options = ["--key", "none", "-o", "seed", 3, "-o", "max_tokens", 200]

    def llm(model: str, *flags: str) -> str:
        return run(installed / "llm", "-m", model, *options, *flags, "abc", folder=tmp_path, LLM_USER_PATH=tmp_path)

    assert llm("tiny", "--no-stream") == llm("tiny") == text(server, rule=None) + "\n"
    assert llm("tiny", "--schema", json.dumps(SCHEMA)) == text(server, rule=None, response_format=FORMAT) + "\n"
    answer = server.post("/v1/completions", {"prompt": "abc", "seed": 3, "max_tokens": 200}).json()
    assert llm("tiny-text") == answer["choices"][0]["text"] + "\n"


SAMPLING = {
    "n": 2,
    "seed": 5,
    "temperature": 0.8,
    "top_p": 0.9,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"70": 2},
    "stop": ["zz"],
}
CHAT = {"model": "tiny", "messages": [ABC], "max_completion_tokens": 60, "seed": 3}
TEXT = {"model": "tiny", "prompt": "abc", "max_tokens": 20}
CHOICES = [
    ("text", TEXT | {"logprobs": 2, "echo": True} | SAMPLING),
    ("text", TEXT | {"seed": 5, "top_k": 3, "rule": "coupled", "draft_length": 2}),
    ("chat", CHAT | {"logprobs": True, "top_logprobs": 2} | SAMPLING),
    ("chat", CHAT | {"response_format": FORMAT}),
    ("chat", CHAT | {"tools": TOOLS, "tool_choice": "required"}),
    ("chat", CHAT | {"temperature": 0, "prediction": {"type": "content", "content": "abcabc"}}),
]
SEEDED = {"model": "tiny", "seed": 3, "rule": "coupled"}
RESPONSE = SEEDED | {"input": "abc", "max_output_tokens": 200}
MESSAGE = SEEDED | {"messages": [ABC], "max_tokens": 200}
FLAT = [{"type": "function", "strict": True} | tool["function"] for tool in TOOLS]
CLIENT = [{"name": tool["function"]["name"], "input_schema": SCHEMA} for tool in TOOLS]
FORM = {"type": "json_schema", "schema": SCHEMA}
PARTS = [  # each with the same as fields of a chat
    ("responses", RESPONSE, {}),
    ("responses", RESPONSE | {"text": {"format": FORM | {"name": "n", "strict": True}}}, {"response_format": FORMAT}),
    ("responses", RESPONSE | {"tools": FLAT, "tool_choice": "required"}, {"tools": TOOLS, "tool_choice": "required"}),
    ("messages", MESSAGE, {}),
    ("messages", MESSAGE | {"output_config": {"format": FORM}}, {"response_format": FORMAT}),
    (
        "messages",
        MESSAGE | {"tools": CLIENT, "tool_choice": {"type": "any"}},
        {"tools": TOOLS, "tool_choice": "required"},
    ),
]


def said(choices: list[dict]) -> dict[int, tuple[str, str]]:
    """What each choice says and calls, whether it came whole or in parts."""
    found: dict[int, list[str]] = {}
    for choice in choices:
        message = choice.get("message") or choice.get("delta") or {}
        text = found.setdefault(choice["index"], ["", ""])
        text[0] += choice.get("text") or message.get("content") or ""
        for call in message.get("tool_calls") or []:
            text[1] += (call["function"].get("name") or "") + call["function"]["arguments"]
    return {index: (text, calls) for index, (text, calls) in found.items()}


def told(answer: dict) -> tuple[str, list]:
    """Text and calls of a response or a message."""
    parts = answer["output"] if "output" in answer else answer["content"]
    written = [one["text"] for part in parts for one in part.get("content", [part]) if "text" in one]
    called = [[part["name"], part["input"]] for part in parts if part["type"] == "tool_use"]
    called += [[part["name"], json.loads(part["arguments"])] for part in parts if part["type"] == "function_call"]
    return "".join(written), called


def test_clients_for_node_are_told_what_a_plain_request_is_told(server: Served, tmp_path: Path):
    assert shutil.which("npm"), "this test needs node and npm"
    packages = [f"openai@{VERSIONS['openai for Node']}", f"@anthropic-ai/sdk@{VERSIONS['@anthropic-ai/sdk']}"]
    run("npm", "install", "--silent", *packages, folder=tmp_path)
    shutil.copy(HERE / "ask_node.mjs", tmp_path)
    chosen = [
        (kind, body | {"stream": stream})
        for kind, body in CHOICES
        for stream in (False, True)
        if not (stream and "echo" in body)
    ]
    parted = [(kind, body | {"stream": stream}, same) for kind, body, same in PARTS for stream in (False, True)]
    asked = json.dumps([*chosen, *(one[:2] for one in parted)])
    seen = json.loads(run("node", "ask_node.mjs", server.url, folder=tmp_path, given=asked))
    for (kind, body), choices in zip(chosen, seen["answers"], strict=False):
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        same = server.post(path, body | {"stream": False}).json()["choices"]
        assert said(choices) == said(same), body
        assert [one["finish_reason"] for one in same] == [
            one["finish_reason"] for one in sorted(choices, key=lambda one: one["index"]) if one["finish_reason"]
        ]
    for (_, body, fields), answer in zip(parted, seen["answers"][len(chosen) :], strict=True):
        same = plain(server, **fields)["choices"][0]["message"]
        called = [one["function"] for one in same.get("tool_calls") or ()]
        expected = same["content"] or "", [[one["name"], json.loads(one["arguments"])] for one in called]
        assert told(answer) == expected, body
        assert answer.get("streamed", expected[0]) == expected[0], body
    assert seen["refused"] == [["BadRequestError", 400, "best_of"], ["BadRequestError", 400, None]]
