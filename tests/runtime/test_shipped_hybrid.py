"""The shipped hybrid writes what it writes in transformers, and drafts for the demo's target."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.making.kept_bundles import DEMO_DRAFTS, PAIR, TARGET
from trt_spec.tools.prompts.shipped import bench_prompts

from ..kit.bundles import Pair, export_pair
from ..kit.recorded import transformers_greedy

RULES = ("rejection", "tokenwise", "coupled")
LENGTHS = (4, "3+3", "4/8")  # a line, a comb and a tree
CODE = [*bench_prompts("python", 0), *bench_prompts("code", 0)]  # of no file that anything was learned from
HYBRID = PAIR / "pycode-hybrid-1m"
PAGE = Path(__file__).parents[2] / "tools/demo_pair/README.md"


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The hybrid as a target, with the demo's draft."""
    return export_pair(HYBRID, tmp_path_factory.mktemp("drafted") / "bundle", DEMO_DRAFTS["model"], max_length=512)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The demo's target, with the hybrid as its second draft."""
    drafts = [DEMO_DRAFTS["model"], HYBRID]
    return export_pair(TARGET, tmp_path_factory.mktemp("drafting") / "bundle", drafts, max_length=1024)


def encoded(prompts: list[Any]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(HYBRID / "tokenizer.json"))
    return [tokenizer.encode(prompt).ids for prompt in prompts]


def test_it_is_a_qwen_of_less_than_six_megabytes_with_the_tokenizer_of_the_pair() -> None:
    assert sum(file.stat().st_size for file in HYBRID.iterdir()) < 6e6
    config = json.loads((HYBRID / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("qwen3_5_text", "float16")
    assert (HYBRID / "tokenizer.json").read_bytes() == (TARGET / "tokenizer.json").read_bytes()


@pytest.mark.exhaustive
def test_its_greedy_text_is_transformers_in_lines_combs_and_trees(drafted: Pair) -> None:
    prompts = encoded(CODE[::2])
    expected = transformers_greedy(drafted.reference, prompts, 48)
    choices: list[tuple[str, Any]] = [("none", 0), ("lookup", 4), ("suffix", 6), ("model+lookup", 3)]
    choices += [("model", length) for length in LENGTHS]
    with Decoder.open(drafted.bundle, max_batch=4) as decoder:
        for place, (drafter, length) in enumerate(choices):
            params = SamplingParams(max_new_tokens=48, temperature=0, rule=RULES[place % len(RULES)])
            outputs = decoder.generate(prompts, params, drafter=drafter, draft_length=length)
            assert [[*output.token_ids] for output in outputs] == expected, (drafter, length)
        assert decoder.speculation.acceptance > 0.2


@pytest.mark.exhaustive
@pytest.mark.parametrize("rule", RULES)
def test_it_drafts_for_the_demos_target(drafting: Pair, rule: str) -> None:
    prompts = encoded(CODE)
    expected = transformers_greedy(drafting.reference, prompts, 64)
    params = SamplingParams(max_new_tokens=64, temperature=0, rule=rule)
    with Decoder.open(drafting.bundle, max_batch=4) as decoder:
        for drafter, length in (*(("model2", length) for length in LENGTHS), ("model+model2", 3)):
            outputs = decoder.generate(prompts, params, drafter=drafter, draft_length=length)
            assert [[*output.token_ids] for output in outputs] == expected, (drafter, length)


@pytest.mark.exhaustive
def test_the_page_says_how_many_tokens_a_round_it_brings(drafting: Pair) -> None:
    """Beside the demo's draft, with K 4."""
    with Decoder.open(drafting.bundle, max_batch=7) as decoder:
        for asked, temperature in (("greedily", 0), ("at temperature 1", 1)):
            found = []
            for drafter in ("model", "model2"):
                own = SamplingParams(max_new_tokens=128, temperature=temperature, ignore_eos=True)
                params = [replace(own, seed=seed) for seed, _ in enumerate(CODE)]
                outputs = decoder.generate(CODE, params, drafter=drafter, draft_length=4)
                rounds = sum(output.speculation.rounds for output in outputs)
                found.append(sum(output.speculation.tokens for output in outputs) / rounds)
            row = re.search(rf"\| {asked} \| (\S+) \| (\S+) \|", PAGE.read_text())
            assert row is not None
            assert [float(number) for number in row.groups()] == pytest.approx(found, abs=0.05), asked
