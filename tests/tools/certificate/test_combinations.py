"""Combinations are covered, not crossed: what the checks say that they combine, they do."""

from itertools import product

import pytest
from trt_spec.engines import Bundle, RequestError
from trt_spec.engines.onnxruntime import OnnxRuntimeEngine
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.acceptance.parameter_fields import RULES as TESTS
from trt_spec.runtime.state.shapes import MOST_LINES, Shape
from trt_spec.tools.certificate.distribution import OF_RANDOM, SHAPES, TREE_SETTINGS, line_cases, shape_cases
from trt_spec.tools.certificate.same_text import RULES, PlainAnswer, as_asked, each_prompt, in_turn, list_cases, mixed
from trt_spec.tools.certificate.semantics import taking_turns
from trt_spec.tools.certificate.subject import (
    COMBS_AND_TREES,
    Subject,
    combs_and_trees,
    controllers,
    draft_lengths,
    kinds,
    several,
    shapes,
    takes_trees,
)

from ...kit.bundles import Pair
from ...kit.costs import SIBLINGS, known_costs, table

PROMPTS = 6


@pytest.fixture
def asked() -> list[PlainAnswer]:
    """Each prompt with each rule, as they are asked; no answers are needed."""
    return [PlainAnswer((prompt,), params, None) for params in RULES for prompt in range(PROMPTS)]  # type: ignore[arg-type]


def test_a_case_asks_each_prompt_once_and_each_rule_alike(asked: list[PlainAnswer]):
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
    one = [PlainAnswer((number,), RULES[0], None) for number in range(requests)]  # type: ignore[arg-type]
    again, choices = taking_turns(one, drafters, [1, 4, 16])
    assert set(choices) == set(product(drafters, [1, 4, 16]))
    assert all(again.count(each) >= 2 for each in one)
    by_request = {each.prompt: {d for a, (d, _) in zip(again, choices, strict=True) if a is each} for each in one}
    assert all(len(drafters) > 1 for drafters in by_request.values()), "with another drafter each time"


def test_the_same_text_meets_each_drafter_with_each_length_together(llama: Pair):
    subject = Subject(Bundle.open(llama.bundle), "onnxruntime", "cpu", 4)
    with known_costs(table(batches=(1,), beside=SIBLINGS)), subject.open() as decoder:
        everything = {choice for drafter in decoder.drafters for choice in shapes(decoder, drafter)}
        apart = list_cases(decoder, apart=True)
        in_turn = list_cases(decoder, apart=False)
        assert {choice for _, choices in apart for choice in choices} == everything | set(controllers(decoder))
        assert {choice for _, choices in in_turn for choice in choices} == everything | set(controllers(decoder))
        each = [kind for drafter in decoder.drafters for kind in kinds(decoder, drafter) if kind]
        assert len(in_turn) == len(each) + bool(several(decoder)) + len(controllers(decoder))
        assert len(set(mixed(decoder, len(everything)))) > 0.6 * len(everything)
        first = [drafter.split("+")[0] for drafter, _ in mixed(decoder, PROMPTS)]
        assert set(first) == set(decoder.drafters)


def test_combs_are_tried_where_the_decoder_takes_them(llama: Pair):
    subject = Subject(Bundle.open(llama.bundle), "onnxruntime", "cpu", 4)
    with subject.open() as decoder:
        assert [name for name in decoder.drafters if combs_and_trees(decoder, name)] == ["model", "ngram", "random"]
        assert combs_and_trees(decoder, "model") == list(COMBS_AND_TREES)
        hung = [one for one in COMBS_AND_TREES if one.leaves]
        assert combs_and_trees(decoder, "random") == hung, "only a model grows a tree"
        tried = {k for drafter, k in shapes(decoder, "model") if drafter == "model"}
        assert tried == {*draft_lengths(decoder), *COMBS_AND_TREES}
        assert [k for drafter, k in shapes(decoder, "lookup") if drafter == "lookup"] == draft_lengths(decoder)
        assert any(isinstance(k, Shape) and k.leaves for _, k in mixed(decoder, PROMPTS))
        for params in (*RULES, SamplingParams(min_tokens=2)):
            for drafter, k, message in (
                ("model", COMBS_AND_TREES[0], "has siblings, which"),
                ("random+model", 2, "has several lines, which"),
            ):
                as_it_can, length = as_asked((drafter, k), params)
                decoder.submit([1, 2], params, drafter=as_it_can, draft_length=length)
                if not takes_trees(params):
                    with pytest.raises(RequestError, match=message):
                        decoder.submit([1, 2], params, drafter=drafter, draft_length=k)
    with subject.in_engine("openvino").open() as decoder:
        assert not any(combs_and_trees(decoder, drafter) for drafter in decoder.drafters), "it verifies lines only"
        assert not several(decoder)
        for cases in (shape_cases, line_cases):
            assert cases(decoder, each=True) == cases(decoder, each=False) == []


def test_what_is_too_wide_by_one_rule_is_not_tried(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    """An engine of narrow steps takes some trees under coupled only; those that all rules take are tried."""
    monkeypatch.setattr(OnnxRuntimeEngine, "verify_width", 17)
    subject = Subject(Bundle.open(llama.bundle), "onnxruntime", "cpu", 4)
    with subject.open() as decoder:
        assert not combs_and_trees(decoder, "model")
        assert not several(decoder)
    monkeypatch.setattr(OnnxRuntimeEngine, "verify_width", 33)
    with subject.open() as decoder:
        found = several(decoder)
        assert {len(drafter.split("+")) for drafter, _ in found} == {2}
        for drafter, k in found:
            decoder.submit([1, 2], SamplingParams(temperature=1.0), drafter=drafter, draft_length=k)


def test_each_source_has_a_line_beside_another(llama: Pair):
    subject = Subject(Bundle.open(llama.bundle), "onnxruntime", "cpu", 4)
    with subject.open() as decoder:
        found = several(decoder)
        names = [name for name in decoder.drafters if name != "cascade"]
        for place in range(2):
            assert {drafter.split("+")[place] for drafter, _ in found} == set(names), "the first, and behind another"
        assert max(len(drafter.split("+")) for drafter, _ in found) == MOST_LINES
        assert all(any(drafter.count(name) > 1 for drafter, _ in found) for name in ("lookup", "suffix"))
        every, few = line_cases(decoder, each=True), line_cases(decoder, each=False)
        assert {drafter for _, _, drafter, _ in every} == {drafter for drafter, _ in found}
        assert {rule for _, rule, _, _ in every} == {rule for _, rule, _, _ in few} == set(TESTS)


def test_alone_each_tree_is_met_by_requests_that_take_it(llama: Pair, asked: list[PlainAnswer]):
    subject = Subject(Bundle.open(llama.bundle), "onnxruntime", "cpu", 4)
    with subject.open() as decoder:
        met = set()
        for number, (_, choices) in enumerate(list_cases(decoder, apart=False)):
            some, chosen = in_turn(asked, choices, number, batch=1)
            assert [one.prompt for one in some] == [(prompt,) for prompt in range(PROMPTS)]
            met |= {as_asked(choice, one.params) for one, choice in zip(some, chosen, strict=True)}
        trees = {(drafter, comb) for drafter in decoder.drafters for comb in combs_and_trees(decoder, drafter)}
        assert trees | set(several(decoder)) <= met


def test_the_distribution_of_combs_is_sampled_for_each_drafter_rule_and_shape(llama: Pair):
    subject = Subject(Bundle.open(llama.bundle), "onnxruntime", "cpu", 4)
    with subject.open() as decoder:
        every, few = shape_cases(decoder, each=True), shape_cases(decoder, each=False)
        able = {drafter: shapes for drafter in decoder.drafters if (shapes := combs_and_trees(decoder, drafter))}
    pairs = {(drafter, shape) for drafter in able for shape in SHAPES if shape in able[drafter]}
    assert {one[1:] for one in every} == {(rule, *pair) for rule in TESTS for pair in pairs}
    assert len(set(every)) == len(every)
    expected = {*product(TREE_SETTINGS, able.keys() - {"random"}), (OF_RANDOM, "random")}
    assert {(settings, drafter) for settings, _, drafter, _ in every} == expected
    assert [rule for _, rule, _, _ in few] == 2 * list(TESTS)
    assert {shape for *_, shape in few} == set(SHAPES)
