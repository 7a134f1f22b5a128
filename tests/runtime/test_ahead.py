"""What depends on the tokens of the round itself, with combs and several lines: each node has what its path says."""

from dataclasses import replace

import pytest
from trt_spec.runtime import Decoder, RequestError, SamplingParams
from trt_spec.runtime.acceptance.filters import FILTERS
from trt_spec.runtime.acceptance.filters.penalties import Penalties
from trt_spec.runtime.state.line import IN_LINE
from trt_spec.runtime.state.tree import Tree

from ..kit.bundles import Pair
from ..kit.chi_squared import p_value_of
from ..kit.exact import SETTINGS
from ..kit.grammars import NESTED, WORDS
from ..kit.prompts import REPEATS, random_prompts
from ..kit.sampled import FALSE_ALARM

TREES = (
    ("model", "3+3"),
    ("random", "2+6"),
    ("model", "3/9"),
    ("model", "2x2x1"),
    ("model", "4/12"),
    ("model+random", 3),
    ("suffix+suffix+model", 4),
    ("random+model+lookup", 2),
)
READING_AHEAD = {
    "penalties": SamplingParams(
        max_new_tokens=40, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3, ignore_eos=True
    ),
    "min_tokens": SamplingParams(max_new_tokens=40, min_tokens=9, stop_token_ids=range(2, 40)),
    "grammar": SamplingParams(max_new_tokens=40, grammar=WORDS),
    "both": SamplingParams(max_new_tokens=40, grammar=NESTED, repetition_penalty=1.3, frequency_penalty=0.7, top_k=9),
}
RULES = {
    "greedy": SamplingParams(),
    "coupled": SamplingParams(temperature=1.0, rule="coupled", seed=3),
}


def asked(kind: str, rule: str) -> SamplingParams:
    return replace(
        READING_AHEAD[kind], **{name: getattr(RULES[rule], name) for name in ("temperature", "rule", "seed")}
    )


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", READING_AHEAD)
def test_the_text_is_that_of_plain_decoding(llama: Pair, kind: str, rule: str):
    """Alone and beside others, who ask for something else; half of the shapes under each rule."""
    params, others = asked(kind, rule), [asked(other, rule) for other in READING_AHEAD]
    prompts, first = (
        [*random_prompts(64, [1, 5, 23], seed=8), REPEATS],
        [*READING_AHEAD].index(kind) + (rule == "greedy"),
    )
    with Decoder.open(llama.bundle, max_batch=4) as decoder:
        expected = [one.token_ids for one in decoder.generate(prompts, params, draft_length=0)]
        mixed = [one.token_ids for one in decoder.generate(prompts, others, draft_length=0)]
        for drafter, length in TREES[first % 2 :: 2]:
            found = decoder.generate(prompts, params, draft_length=length, drafter=drafter)
            assert [one.token_ids for one in found] == expected, f"{drafter}, {length}"
            [alone] = decoder.generate(prompts[-1], params, draft_length=length, drafter=drafter)
            assert alone.token_ids == expected[-1], f"{drafter}, {length}, alone"
        for drafter, length in TREES[first % 4 :: 4]:
            found = decoder.generate(prompts, others, draft_length=length, drafter=drafter)
            assert [one.token_ids for one in found] == mixed, f"{drafter}, {length}, beside others"
        assert decoder.speculation.accepted


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "rule", "drafter", "k"),
    [
        ("everything", "rejection", "model", "2+2"),
        ("everything", "tokenwise", "model", "2+2"),
        ("everything", "rejection", "model", "2/5"),
        ("everything", "tokenwise", "model", "2x2"),
        ("everything", "rejection", "model+random", 2),
        ("everything", "tokenwise", "random+model", 2),
        ("penalised", "coupled", "model+random", 2),
    ],
)
def test_output_is_distributed_as_the_target_alone(eight: Pair, settings: str, rule: str, drafter: str, k: int | str):
    assert p_value_of(eight, replace(SETTINGS[settings], rule=rule), 4_000, k, drafter, depth=3) > FALSE_ALARM


@pytest.mark.exhaustive
def test_chi_squared_catches_counts_along_the_columns(eight: Pair, monkeypatch: pytest.MonkeyPatch):
    """A planted fault: siblings count the whole line before them."""
    monkeypatch.setattr(
        Tree, "counts", lambda self, tokens, before, width, _: IN_LINE.counts(tokens, before, width, None)
    )
    params = replace(SETTINGS["everything"], rule="coupled")
    assert p_value_of(eight, params, 4_000, "2+4", depth=3) < FALSE_ALARM


def test_a_filter_that_knows_lines_only_is_refused_with_trees(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    one = next(one for one in FILTERS if isinstance(one, Penalties))
    monkeypatch.setattr(one, "reads_trees", False)
    params = SamplingParams(presence_penalty=1.0)
    with Decoder.open(llama.bundle) as decoder:
        decoder.submit([1, 2], params, draft_length=4)
        for drafter, length, message in (
            ("model", "3+3", "branches, which"),
            ("model", "3/6", "branches, which"),
            ("model+random", 3, "several lines, which"),
        ):
            with pytest.raises(RequestError, match=f"has {message} repetition_penalty or presence_penalty or"):
                decoder.submit([1, 2], params, draft_length=length, drafter=drafter)
