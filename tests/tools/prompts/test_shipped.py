"""The shipped prompts: five kinds, each long enough to measure and short enough to leave room."""

import json

import pytest
from tokenizers import Tokenizer
from trt_spec.tools.making.kept_bundles import TARGET
from trt_spec.tools.prompts.shipped import KINDS, WRITTEN, bench_prompts


@pytest.mark.parametrize("kind", [*WRITTEN, "random"])
def test_every_kind_has_eight_prompts_that_leave_room_for_256_tokens(kind):
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = bench_prompts(kind, 4096)
    lengths = [len(tokenizer.encode(prompt).ids) if isinstance(prompt, str) else len(prompt) for prompt in prompts]
    assert len(set(map(str, prompts))) == len(prompts) == 8
    assert min(lengths) >= 30
    assert max(lengths) + 256 <= 1024


def test_random_tokens_are_the_same_each_time_and_all_in_the_vocabulary():
    prompts = bench_prompts("random", 50)
    assert prompts == bench_prompts("random", 50)
    assert {token for prompt in prompts for token in prompt} == set(range(50))


def test_a_kind_is_named_where_a_file_may_be(run, llama, tmp_path):
    few = ("--max-new-tokens", 24, "--repeats", 1, "--draft-lengths", 2)
    found = json.loads(run("bench", "--bundle", llama.bundle, "--prompts", "random", *few, "--json").out)
    assert (found["prompts"], found["prompts_from"]) == (8, "random")
    helped = run("bench", "--help").out
    assert all(kind in helped for kind in KINDS)
