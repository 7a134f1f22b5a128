"""Clients that users have, as their registries ship them: OpenAI's own for Node, and lm-evaluation-harness."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ...bundles import Pair
from ...kit.schemas import FORMAT, TOOLS
from .conftest import Served, serving

pytestmark = [pytest.mark.clients, pytest.mark.long, pytest.mark.xdist_group("clients")]

PROMPTS = ["abcd", "hello there", "a b c"]


@pytest.fixture(scope="module")
def server(signs: Pair) -> Iterator[Served]:
    with serving(signs) as server:
        yield server


def run(*command: object, folder: Path, given: str = "") -> str:
    done = subprocess.run([str(part) for part in command], input=given, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


NODE = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
let asked = "";
for await (const part of process.stdin) asked += part;
const answers = [];
for (const [kind, body] of JSON.parse(asked)) {
  const create = kind === "chat" ? client.chat.completions : client.completions;
  const answer = await create.create(body);
  const parts = [];
  if (body.stream) for await (const chunk of answer) parts.push(...chunk.choices);
  else parts.push(...answer.choices);
  answers.push(parts);
}
const refused = await client.completions.create({ model: "tiny", prompt: "a", best_of: 2 }).catch((error) => error);
console.log(JSON.stringify({ answers, refused: [refused.constructor.name, refused.status, refused.param] }));
"""
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
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "abc"}], "max_completion_tokens": 60, "seed": 3}
ASKED = [
    ("text", {"model": "tiny", "prompt": "abc", "max_tokens": 20, "logprobs": 2, "echo": True} | SAMPLING),
    (
        "text",
        {
            "model": "tiny",
            "prompt": "abc",
            "max_tokens": 20,
            "seed": 5,
            "top_k": 3,
            "rule": "coupled",
            "draft_length": 2,
        },
    ),
    ("chat", CHAT | {"logprobs": True, "top_logprobs": 2} | SAMPLING),
    ("chat", CHAT | {"response_format": FORMAT}),
    ("chat", CHAT | {"tools": TOOLS, "tool_choice": "required"}),
    ("chat", CHAT | {"temperature": 0, "prediction": {"type": "content", "content": "abcabc"}}),
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


def test_openais_client_for_node_gets_what_a_plain_request_gets(server: Served, tmp_path: Path):
    assert shutil.which("npm"), "this test needs node and npm"
    run("npm", "install", "--silent", "openai@7.57.0", folder=tmp_path)
    (tmp_path / "ask.mjs").write_text(NODE)
    asked = [
        (kind, body | {"stream": stream})
        for kind, body in ASKED
        for stream in (False, True)
        if not (stream and "echo" in body)
    ]
    seen = json.loads(run("node", "ask.mjs", server.url, folder=tmp_path, given=json.dumps(asked)))
    for (kind, body), choices in zip(asked, seen["answers"], strict=True):
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        plain = server.post(path, body | {"stream": False}).json()["choices"]
        assert said(choices) == said(plain), body
        assert [one["finish_reason"] for one in plain] == [
            one["finish_reason"] for one in sorted(choices, key=lambda one: one["index"]) if one["finish_reason"]
        ]
    assert seen["refused"] == ["BadRequestError", 400, "best_of"]


TASK = """
task: continued
dataset_path: json
dataset_kwargs:
  data_files: {file}
output_type: multiple_choice
test_split: train
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
"""


def test_an_evaluation_measures_the_likelihoods_that_transformers_gives(server: Served, signs: Pair, tmp_path: Path):
    run(sys.executable, "-m", "venv", "env", folder=tmp_path)
    run("env/bin/pip", "install", "-q", "lm_eval[api]==0.4.13", "transformers", folder=tmp_path)
    choices = [" once more", "abc", "zyx zyx"]
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "choices": choices}) + "\n" for prompt in PROMPTS)
    )
    (tmp_path / "task.yaml").write_text(TASK.format(file=tmp_path / "data.jsonl"))
    model = f"model=tiny,base_url={server.url}/v1/completions,tokenizer={signs.checkpoint}"
    command = ["env/bin/lm_eval", "--model", "local-completions", "--model_args", model, "--tasks", "continued"]
    run(*command, "--include_path", ".", "--output_path", "out", "--log_samples", folder=tmp_path)
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    seen = [json.loads(line) for line in samples.read_text().splitlines()]
    assert sorted(one["doc"]["prompt"] for one in seen) == sorted(PROMPTS)
    encode = server.decoder.tokenizer.encode
    for one in seen:
        for choice, [[likelihood, _]] in zip(choices, one["resps"], strict=True):
            prompt = encode(one["doc"]["prompt"]).ids
            whole = encode(one["doc"]["prompt"] + choice).ids
            assert whole[: len(prompt)] == prompt
            with torch.inference_mode():
                logprobs = signs.reference(torch.tensor([whole])).logits[0].log_softmax(-1)
            expected = sum(float(logprobs[at - 1, whole[at]]) for at in range(len(prompt), len(whole)))
            assert float(likelihood) == pytest.approx(expected, abs=1e-3)
