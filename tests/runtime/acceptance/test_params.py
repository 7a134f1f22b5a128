"""What is invalid is refused before it gets a row, in one sentence of what was found and what was expected."""

import math
import pickle
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import pytest
from trt_spec.runtime import Decoder, RequestError, SamplingParams
from trt_spec.runtime.acceptance.filters import FILTERS
from trt_spec.runtime.acceptance.parameter_fields import HELP

from ...kit.bundles import Pair
from ..scripted import ScriptedEngine, scripted_decoder

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "values", "expected"),
    [
        ("max_new_tokens", [0, -1, 1.5, True, "9", None], "a whole number >= 1"),
        ("temperature", [-0.1, NAN, INF, "hot", None, True, 10**400, 1e-6], "0 or a number from 1e-05 to 100000"),
        ("draft_temperature", [-0.1, NAN, INF, "hot", True, 1e-6], "0 or a number from 1e-05 to 100000"),
        ("top_k", [-1, 1.5, NAN, None], "a whole number >= 0 (0 = off)"),
        ("top_p", [0, 0.0, -1, 1.01, NAN, None], "a number in (0, 1]"),
        ("min_p", [-0.1, 1.1, NAN, None], "a number in [0, 1]"),
        ("repetition_penalty", [0, -1.0, NAN, INF], "a number from 0.001 to 1000"),
        ("presence_penalty", [NAN, INF, "1"], "a number from -1e+06 to 1e+06"),
        ("frequency_penalty", [NAN, -INF, None], "a number from -1e+06 to 1e+06"),
        (
            "logit_bias",
            [{-1: 1.0}, {1.5: 1.0}, {1: NAN}, {1: INF}, {"1": 1.0}, [1], None],
            "a mapping of token ids to -inf or numbers from -1e+06 to 1e+06",
        ),
        ("stop", [[""], "", [1], None, 7], "a list of strings, none empty"),
        ("stop_token_ids", [[-1], [1.0], 5, None, "ab"], "a list of token ids"),
        ("ignore_eos", [1, None, "yes"], "true or false"),
        ("min_tokens", [-1, 1.0, True, 129, None], "a whole number from 0 to 128"),
        ("seed", [-1, 2**64, 1.0, True], "a whole number below 2^64"),
        ("logprobs", [-1, 21, 1.0, True], "a whole number from 0 to 20"),
        ("rule", ["greedy", None, 1], "one of rejection, tokenwise, coupled"),
        ("lenience", [0, -0.5, 1.01, NAN, None, "1"], "a number in (0, 1]"),
    ],
)
def test_an_invalid_value_is_refused_by_name_with_what_was_expected(field: str, values: list, expected: str):
    for value in values:
        with pytest.raises(RequestError) as error:
            SamplingParams(**{field: value})
        message = str(error.value)
        assert message.startswith(f"{field} is ")
        assert message.endswith(f", expected {expected}")
        assert "\n" not in message


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [1e39, 1e-40, 1e-300]),
        ("repetition_penalty", [1e39, 1e-45, 1e-300]),
        ("presence_penalty", [1e39, -1e39]),
        ("frequency_penalty", [1e39, -1e39]),
        ("logit_bias", [{2: 1e39}, {2: -1e39}, dict.fromkeys(range(8), -INF)]),
        ("top_p", [1e-50, 1 - 1e-12]),
        ("min_p", [1e-50]),
        ("top_k", [10**30]),
        ("logprobs", [20]),
    ],
)
@pytest.mark.parametrize("rule", ["rejection", "tokenwise", "coupled"])
def test_an_extreme_value_is_refused_or_works_and_never_harms_a_neighbour(
    eight: Pair, field: str, values: list, rule: str
):
    """Scores are float32: a number that overflows there must not reach the round that others share."""
    with Decoder.open(eight.bundle) as decoder:
        for value in values:
            neighbour = decoder.submit([2, 3, 4], SamplingParams(max_new_tokens=6, ignore_eos=True))
            fields = {"temperature": 1.0, "seed": 1, "rule": rule, field: value}
            try:
                request = decoder.submit([2, 3, 4], SamplingParams(**fields, max_new_tokens=6, ignore_eos=True))
            except RequestError:
                request = None
            while decoder.step():
                pass
            assert neighbour.finish_reason == "length", f"{field} {value!r} ended a neighbour"
            if request is not None:
                assert request.finish_reason == "length"
                assert all(0 <= token < 8 for token in request.token_ids)


def test_lenience_is_refused_under_the_rule_that_keeps_one_text():
    message = "lenience 0.5 lets the draft change the text, but rule coupled gives one text for any draft; choose rule "
    for temperature in (0, 1.0):
        with pytest.raises(RequestError, match=f"^{re.escape(message)}rejection, or lenience 1$"):
            SamplingParams(temperature=temperature, rule="coupled", lenience=0.5)


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_one_stop_string_may_be_given_as_it_is():
    assert tuple(SamplingParams(stop="END").stop) == ("END",)


def test_every_field_is_explained():
    assert set(HELP) == set(SamplingParams.__dataclass_fields__)


def test_defaults_are_greedy_without_any_transform():
    params = SamplingParams()
    assert params.greedy
    assert not any(one.active(params) for one in FILTERS)
    assert params.rule == "rejection"


# Submitting.

NO_NGRAMS = "the bundle has no table of n-grams; count one with trt-spec ngram --bundle BUNDLE --text FILE"


@pytest.fixture
def decoder(tmp_path: Path):
    """Vocabulary of 257 tokens, at most 100 of them together."""
    with scripted_decoder(tmp_path, lambda context: 5, lambda context: 5, max_length=100) as decoder:
        yield decoder


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty; give at least one token"),
        ("", {}, "the prompt is empty; give at least one token"),
        ([1, 257], {}, "prompt token id 257 is outside the vocabulary of 257 tokens"),
        ([-1], {}, "prompt token id -1 is outside the vocabulary of 257 tokens"),
        (
            [1] * 95,
            {},
            "prompt of 95 tokens and max_new_tokens 8 exceed the bundle's limit of 100 by 3; shorten either",
        ),
        (
            [1],
            {"draft_length": 17},
            "draft_length is 17, expected auto, a whole number from 0 to 16, a comb like 5+3, or a tree like 4/12 or "
            "3x2x1",
        ),
        (
            [1],
            {"draft_length": -1},
            "draft_length is -1, expected auto, a whole number from 0 to 16, a comb like 5+3, or a tree like 4/12 or "
            "3x2x1",
        ),
        (
            [1],
            {"draft_length": 2.0},
            "draft_length is 2.0, expected auto, a whole number from 0 to 16, a comb like 5+3, or a tree like 4/12 or "
            "3x2x1",
        ),
        (
            [1],
            {"drafter": "hydra"},
            "drafter is 'hydra', expected one of model, lookup, suffix, ngram, random, cascade, none, mixed; or "
            "several, as model+suffix",
        ),
        ([1], {"drafter": "ngram"}, NO_NGRAMS),
    ],
)
def test_a_request_that_cannot_run_is_refused_before_it_starts(decoder: Decoder, prompt, options: dict, message: str):
    message = message.replace("BUNDLE", str(decoder.bundle.path))
    with pytest.raises(RequestError, match=f"^{re.escape(message)}$"):
        decoder.submit(prompt, SamplingParams(max_new_tokens=8), **options)
    assert not decoder.step(), "nothing was queued"


def test_the_longest_request_that_fits_runs_to_its_end(decoder: Decoder):
    for k in (0, 4, 16):
        [output] = decoder.generate([[1] * 92], SamplingParams(max_new_tokens=8), draft_length=k)
        assert output.token_ids == (5,) * 8
        assert output.finish_reason == "length"


@pytest.mark.parametrize(
    "params", [{"logit_bias": {257: 1.0}}, {"stop_token_ids": [999]}, {"extra": {"forced_end": [999]}}]
)
def test_token_ids_of_parameters_outside_the_vocabulary_are_refused(decoder: Decoder, params: dict):
    with pytest.raises(RequestError, match="outside the vocabulary of 257 tokens"):
        decoder.submit([1], SamplingParams(max_new_tokens=8, **params))


def test_text_that_is_no_unicode_is_refused(decoder: Decoder):
    with pytest.raises(RequestError, match="prompt"):
        decoder.submit("a\ud800b", SamplingParams(max_new_tokens=8))


@pytest.mark.parametrize("prompt", [None, 7, [1.0], ["a"], [True], [[1]]])
def test_a_prompt_of_another_type_is_refused(decoder: Decoder, prompt):
    with pytest.raises(RequestError, match="prompt"):
        decoder.submit(prompt, SamplingParams(max_new_tokens=8))


def test_drafting_with_a_model_needs_one_in_the_bundle(tmp_path: Path):
    with scripted_decoder(tmp_path, lambda context: 5) as decoder:
        for drafter in ("model", "cascade"):
            with pytest.raises(RequestError, match=r"has no draft model; use drafter lookup or none$"):
                decoder.submit([1, 2, 3, 4], drafter=drafter)
        request = decoder.submit([1, 2, 3, 4], SamplingParams(max_new_tokens=2))
        assert request.drafter == "lookup", "what a bundle without a draft can do"
        while decoder.step():
            pass
        assert request.finished


def test_a_cascade_needs_a_draft_whose_steps_give_as_many_logits_as_the_targets(tmp_path: Path):
    with patch.object(ScriptedEngine, "verify_width", property(lambda engine: 1 if engine.next_token is one else 17)):
        decoder = scripted_decoder(tmp_path, lambda context: 5, one)
    message = (
        "the draft model gives logits for 1 tokens a step here, drafter cascade needs as many as the target gives; "
        "compile its plans with trt-spec build --draft-trees, or use drafter model"
    )
    with decoder, pytest.raises(RequestError, match=f"^{message}$"):
        decoder.submit([1, 2], drafter="cascade")


def one(context: Sequence[int]) -> int:
    return 1


def test_generate_wants_one_params_for_all_or_one_each(decoder: Decoder):
    with pytest.raises(RequestError, match="1 SamplingParams for 2 prompts, expected one each"):
        decoder.generate([[1], [2]], [SamplingParams()])


def test_generate_takes_text_or_tokens_one_or_many(decoder: Decoder):
    params = SamplingParams(max_new_tokens=2)
    for prompts, count in (("ab", 1), (["ab", "c"], 2), ([97, 98], 1), ([[97, 98], "c"], 2), ([], 0)):
        assert [output.token_ids for output in decoder.generate(prompts, params)] == [(5, 5)] * count


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_a_decoder_needs_room_for_one_request(eight: Pair, value):
    with pytest.raises(RequestError, match=r"max_batch is .*, expected a whole number >= 1"):
        Decoder.open(eight.bundle, max_batch=value)


def test_without_a_seed_every_request_gets_one_of_its_own_and_reports_it(eight: Pair):
    params = SamplingParams(temperature=1.0, max_new_tokens=20, ignore_eos=True)
    with Decoder.open(eight.bundle) as decoder:
        first, second = decoder.generate([[2, 3, 4, 5]] * 2, params)
        assert first.seed != second.seed
        again = decoder.generate(
            [[2, 3, 4, 5]], SamplingParams(temperature=1.0, max_new_tokens=20, ignore_eos=True, seed=first.seed)
        )
    assert again[0].token_ids == first.token_ids


def test_what_the_caller_changes_after_submitting_changes_nothing(tmp_path: Path):
    """A bias that appeared later once killed the neighbours of its request."""
    bias, stop, ids = {3: 1.0}, ["x"], [4]
    params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=ids, max_new_tokens=9, ignore_eos=True)
    bias[10**9], stop[0], ids[0] = 1.0, "y", 5
    assert (dict(params.logit_bias), params.stop, params.stop_token_ids) == ({3: 1.0}, ("x",), (4,))
    with pytest.raises(TypeError):
        params.logit_bias[3] = 2.0
    assert replace(params, seed=1).logit_bias == params.logit_bias
    assert pickle.loads(pickle.dumps(params)) == params
    assert asdict(params)["logit_bias"] == {3: 1.0}


def test_parameters_that_no_filter_reads_are_refused():
    with pytest.raises(RequestError, match=r"extra is .*, expected a mapping with no keys but"):
        SamplingParams(extra={"magic": 1})
