"""A recurrent model with a recurrent draft is served as any other: its texts are the library's, prefixes or not."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.snapshots import EVERY

from ...kit.hybrids import Hybrid
from ...kit.prompts import random_prompts
from .conftest import Served, serving

NEW = 30
LENGTHS = (4, "3+3", "4/8")
RULES: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 0.8, "rule": "coupled", "seed": 5}]


@pytest.fixture(scope="module")
def answering(hybrids: Callable[[str], Hybrid]) -> Iterator[Served]:
    with serving(hybrids("lfm2"), prefix_bytes=2**22) as server:
        yield server


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Three that begin alike, after which others have more than a copy of states, and short ones."""
    [beginning, *short] = random_prompts(64, [200, 3, 9, 40], seed=7)
    return [*([*beginning[:length], length % 64] for length in (170, 190, 200)), *short]


@pytest.fixture(scope="module")
def expected(hybrids: Callable[[str], Hybrid], prompts: list[list[int]]) -> list[list[str]]:
    """By rule, what the library says without a draft, one request after another."""
    params = [SamplingParams(max_new_tokens=NEW, ignore_eos=True, **rule) for rule in RULES]
    with Decoder.open(hybrids("lfm2").bundle, max_batch=1) as decoder:
        return [[output.text for output in decoder.generate(prompts, one, draft_length=0)] for one in params]


def ask(served: Served, fields: dict[str, Any], prompt: list[int]) -> dict[str, Any]:
    answer = served.post("/v1/completions", {"prompt": prompt, "max_tokens": NEW, "ignore_eos": True, **fields})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize("number", range(len(RULES)))
def test_many_at_once_are_answered_as_each_alone_and_again_when_their_beginnings_are_kept(
    answering: Served, prompts: list[list[int]], expected: list[list[str]], number: int
) -> None:
    for length in LENGTHS:
        fields = RULES[number] | {"drafter": "model", "draft_length": length}
        with ThreadPoolExecutor(len(prompts)) as clients:
            answers = list(clients.map(partial(ask, answering, fields), prompts))
        assert [answer["choices"][0]["text"] for answer in answers] == expected[number]
    found = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
    assert found == [EVERY] * 3 + [0] * 3, "states stand where a copy of them was kept"


def test_a_stream_adds_up_to_the_same_text(
    answering: Served, prompts: list[list[int]], expected: list[list[str]]
) -> None:
    for prompt, text in zip(prompts, expected[0], strict=True):
        ours = {"ignore_eos": True, "drafter": "model", "draft_length": 2}
        stream = answering.openai.completions.create(
            model="tiny", prompt=prompt, max_tokens=NEW, temperature=0, stream=True, extra_body=ours
        )
        chunks = [chunk.choices[0].text for chunk in stream if chunk.choices]
        assert "".join(chunks) == text
        assert len(chunks) > 1
