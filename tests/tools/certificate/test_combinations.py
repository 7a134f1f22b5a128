"""Combinations are covered, not crossed: what the checks say that they combine, they do."""

from itertools import product

import pytest
from trt_spec.engines import Bundle, RequestError
from trt_spec.runtime import CombLength, SamplingParams
from trt_spec.runtime.sampling.params import RULES as TESTS
from trt_spec.tools.certificate.distribution import COMB_SETTINGS, COMB_SHAPES, comb_cases
from trt_spec.tools.certificate.same_text import RULES, Asked, as_asked, each_prompt, in_turn, list_cases, mixed
from trt_spec.tools.certificate.semantics import taking_turns
from trt_spec.tools.certificate.subject import COMBS, Subject, combs, controllers, draft_lengths, shapes, takes_siblings

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
        everything = {(drafter, k) for drafter in decoder.drafters for k in shapes(decoder, drafter)}
        apart = list_cases(decoder, apart=True)
        in_turn = list_cases(decoder, apart=False)
        assert {choice for _, choices in apart for choice in choices} == everything | set(controllers(decoder))
        assert {choice for _, choices in in_turn for choice in choices} == everything | set(controllers(decoder))
        hanging = [drafter for drafter in decoder.drafters if combs(decoder, drafter)]
        assert len(in_turn) == len(decoder.drafters) + len(hanging) + len(controllers(decoder))
        assert len(set(mixed(decoder, len(everything)))) > 0.6 * len(everything)
        assert {drafter for drafter, _ in mixed(decoder, PROMPTS)} == set(decoder.drafters)


def test_combs_are_tried_where_the_decoder_takes_them(llama: Pair):
    subject = Subject(Bundle.open(llama.bundle), "onnxruntime", "cpu", 4)
    with subject.open() as decoder:
        assert {drafter for drafter in decoder.drafters if combs(decoder, drafter)} == {"model", "ngram", "random"}
        assert combs(decoder, "model") == list(COMBS)
        assert set(shapes(decoder, "model")) == {*draft_lengths(decoder), *COMBS}
        assert shapes(decoder, "lookup") == draft_lengths(decoder)
        assert any(isinstance(k, CombLength) for _, k in mixed(decoder, PROMPTS))
        for params in (*RULES, SamplingParams(temperature=1.0, lenience=0.5), SamplingParams(min_tokens=2)):
            decoder.submit([1, 2], params, drafter="model", draft_length=as_asked(COMBS[0], params))
            if not takes_siblings(params):
                with pytest.raises(RequestError, match="has siblings, which"):
                    decoder.submit([1, 2], params, drafter="model", draft_length=COMBS[0])
    with subject.in_engine("openvino").open() as decoder:
        assert not any(combs(decoder, drafter) for drafter in decoder.drafters), "it verifies lines only"
        assert comb_cases(decoder, each=True) == comb_cases(decoder, each=False) == []


def test_alone_each_comb_is_met_by_requests_that_take_it(llama: Pair, asked: list[Asked]):
    subject = Subject(Bundle.open(llama.bundle), "onnxruntime", "cpu", 4)
    with subject.open() as decoder:
        met = set()
        for number, (_, choices) in enumerate(list_cases(decoder, apart=False)):
            some, chosen = in_turn(asked, choices, number, batch=1)
            assert [one.prompt for one in some] == [(prompt,) for prompt in range(PROMPTS)]
            met |= {(drafter, as_asked(k, one.params)) for one, (drafter, k) in zip(some, chosen, strict=True)}
        assert {(drafter, comb) for drafter in decoder.drafters for comb in combs(decoder, drafter)} <= met


def test_the_distribution_of_combs_is_sampled_for_each_drafter_rule_and_shape(llama: Pair):
    subject = Subject(Bundle.open(llama.bundle), "onnxruntime", "cpu", 4)
    with subject.open() as decoder:
        every, few = comb_cases(decoder, each=True), comb_cases(decoder, each=False)
        hanging = [drafter for drafter in decoder.drafters if combs(decoder, drafter)]
    assert {one[1:] for one in every} == set(product(TESTS, hanging, COMB_SHAPES))
    assert len(set(every)) == len(every)
    assert {(settings, drafter) for settings, _, drafter, _ in every} == set(product(COMB_SETTINGS, hanging))
    assert [rule for _, rule, _, _ in few] == list(TESTS)
    assert {comb for *_, comb in few} == set(COMB_SHAPES)
