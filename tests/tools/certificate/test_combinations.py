"""Combinations are covered, not crossed: what the checks say that they combine, they do."""

from itertools import product

import pytest
from trt_spec.engines import Bundle
from trt_spec.tools.certificate.same_text import RULES, Asked, each_prompt, list_cases, mixed
from trt_spec.tools.certificate.semantics import taking_turns
from trt_spec.tools.certificate.subject import Subject, controllers, draft_lengths

from ...bundles import Pair
from ...runtime.lengths.test_controller import known_costs, table

PROMPTS = 6


@pytest.fixture
def asked() -> list[Asked]:
    """Each prompt with each rule, as they are asked; no answers are needed."""
    return [Asked((prompt,), params, None) for params in RULES for prompt in range(PROMPTS)]  # type: ignore[arg-type]


def test_a_case_asks_each_prompt_once_and_each_rule_alike(asked: list[Asked]):
    met = set()
    for number in range(len(RULES)):
        some = each_prompt(asked, number)
        assert [one.prompt for one in some] == [(prompt,) for prompt in range(PROMPTS)]
        assert sorted(RULES.index(one.params) for one in some) == [0, 0, 1, 1, 2, 2]
        met |= {(one.prompt, RULES.index(one.params)) for one in some}
    assert len(met) == len(asked), "as many cases as there are rules ask all"


@pytest.mark.parametrize("requests", [2, 4, 6, 12, 18, 24])
@pytest.mark.parametrize("drafters", [("lookup", "suffix", "random"), ("model", "lookup", "suffix", "ngram", "random")])
def test_semantics_meets_each_drafter_with_each_length_and_each_request_twice(requests: int, drafters: tuple[str, ...]):
    one = [Asked((number,), RULES[0], None) for number in range(requests)]  # type: ignore[arg-type]
    again, choices = taking_turns(one, drafters, [1, 4, 16])
    assert set(choices) == set(product(drafters, [1, 4, 16]))
    assert all(again.count(each) >= 2 for each in one)
    by_request = {each.prompt: {d for a, (d, _) in zip(again, choices, strict=True) if a is each} for each in one}
    assert all(len(drafters) > 1 for drafters in by_request.values()), "with another drafter each time"


def test_the_same_text_meets_each_drafter_with_each_length_together(llama: Pair):
    subject = Subject(Bundle.open(llama.bundle), "onnxruntime", "cpu", 4)
    with known_costs(table(batches=(1,))), subject.open() as decoder:
        everything = set(product(decoder.drafters, draft_lengths(decoder)))
        apart = list_cases(decoder, apart=True)
        in_turn = list_cases(decoder, apart=False)
        assert {choice for _, choices in apart for choice in choices} == everything | set(controllers(decoder))
        assert {choice for _, choices in in_turn for choice in choices} == everything | set(controllers(decoder))
        assert len(in_turn) == len(decoder.drafters) + len(controllers(decoder))
        assert len(set(mixed(decoder, len(everything)))) > 0.6 * len(everything)
        assert {drafter for drafter, _ in mixed(decoder, PROMPTS)} == set(decoder.drafters)
