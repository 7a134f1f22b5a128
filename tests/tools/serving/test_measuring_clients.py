"""Programs that measure a server by OpenAI's API: lm-evaluation-harness what it knows, GuideLLM how fast it is."""

import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from ...kit.bundles import Pair
from .clients.installed import environment, run
from .clients.versions import requirements
from .conftest import Served, serving

pytestmark = [pytest.mark.clients, pytest.mark.long, pytest.mark.xdist_group("measuring clients")]

PROMPTS = ["abcd", "hello there", "a b c"]


@pytest.fixture(scope="module")
def server(signs: Pair) -> Iterator[Served]:
    with serving(signs) as server:
        yield server


@pytest.fixture(scope="module")
def installed() -> Path:
    own = f"torch=={version('torch').partition('+')[0]}"  # GuideLLM loads data with it
    needed = [*requirements("lm_eval[api]", "guidellm"), "transformers", own]
    return environment("measuring-clients", *needed)


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


def test_an_evaluation_measures_the_likelihoods_that_transformers_gives(
    server: Served, signs: Pair, installed: Path, tmp_path: Path
):
    choices = [" once more", "abc", "zyx zyx"]
    (tmp_path / "data.jsonl").write_text(
        "".join(json.dumps({"prompt": prompt, "choices": choices}) + "\n" for prompt in PROMPTS)
    )
    (tmp_path / "task.yaml").write_text(TASK.format(file=tmp_path / "data.jsonl"))
    model = f"model=tiny,base_url={server.url}/v1/completions,tokenizer={signs.checkpoint}"
    command = [installed / "lm_eval", "--model", "local-completions", "--model_args", model, "--tasks", "continued"]
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


def test_a_load_of_guidellm_is_answered_without_an_error_by_the_texts_of_plain_requests(
    server: Served, signs: Pair, installed: Path, tmp_path: Path
):
    body = {"seed": 3, "rule": "coupled"}
    backend = {"kind": "openai_http", "target": server.url, "model": "tiny", "extras": {"body": body}}
    flags = {
        "backend": json.dumps(backend),
        "profile": "kind=concurrent,streams=3",
        "constraint": "kind=max_requests,count=12",
        "data": "kind=synthetic_text,prompt_tokens=16,output_tokens=24",
        "tokenizer": f"kind=huggingface_auto,model={signs.checkpoint}",
        "output": f"kind=json,path={tmp_path / 'report.json'}",
    }
    command = [installed / "guidellm", "run", "--disable-console"]
    run(*command, *(part for flag, value in flags.items() for part in (f"--{flag}", value)), folder=tmp_path)
    [benchmark] = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert (len(requests["successful"]), requests["errored"], requests["incomplete"]) == (12, [], [])
    for one in requests["successful"]:
        asked = json.loads(one["request_args"])["body"]
        same = server.post("/v1/chat/completions", asked | {"stream": False, "stream_options": None}).json()
        assert one["output"] == same["choices"][0]["message"]["content"]
        assert (one["prompt_tokens"], one["output_tokens"]) == (same["usage"]["prompt_tokens"], 24)
