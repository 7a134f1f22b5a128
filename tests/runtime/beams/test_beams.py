"""Beam search with and without a draft finds transformers' texts and scores."""

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trt_spec.engines import RequestError
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.full import CacheFull

from ...kit.beams import OF_FIFTY, SETTINGS, Found, assert_theirs, found, ours, theirs
from ...kit.bundles import Pair, export_pair, noisy_draft, resave, rewrite_graph
from ...kit.models import tiny_llama

VOCAB = 64
TOKENS = 24
ALSO_STOP = [5, 9]
FAMILIES = ["llama", "gpt2", "gemma2"]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(2, VOCAB) for _ in range(chance.randrange(1, 20))] for _ in range(count)]


def by_transformers(pair: Pair, prompt: list[int], stops: list[int], asked: dict[str, Any]) -> Found:
    with torch.inference_mode():
        output = pair.reference.generate(
            torch.tensor([prompt]), eos_token_id=stops or None, pad_token_id=0, **theirs(asked, TOKENS)
        )
    return found(output, len(prompt), stops)


def assert_equal_to_transformers(
    pair: Pair, count: int, settings: list[dict[str, Any]], lengths: list[Any], engine: str = "onnxruntime"
) -> Decoder:
    with Decoder.open(pair.bundle, engine=engine, max_batch=3) as decoder:
        stops = sorted({*decoder.bundle.tokenizer.eos_token_ids, *ALSO_STOP})
        for number, asked in enumerate(settings):
            each = prompts(count, number)
            params = ours(asked, max_new_tokens=TOKENS, stop_token_ids=ALSO_STOP)
            expected = [by_transformers(pair, prompt, stops, asked) for prompt in each]
            for length in lengths:
                outputs = decoder.generate(each, params, draft_length=length)
                for output, wanted in zip(outputs, expected, strict=True):
                    assert_theirs(output, wanted)
    return decoder


@pytest.mark.parametrize("family", FAMILIES)
def test_the_texts_are_those_of_transformers_whatever_the_draft_proposes(pairs, family: str) -> None:
    assert_equal_to_transformers(pairs(family), 3, SETTINGS, [0, 1, 4, "2/12"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", FAMILIES)
def test_fifty_prompts_of_each_number_of_beams(pairs, family: str) -> None:
    assert_equal_to_transformers(pairs(family), 50, OF_FIFTY, [0, 3])


@pytest.mark.parametrize("engine", ["torch"])
def test_other_engines_find_the_same(llama: Pair, engine: str) -> None:
    assert_equal_to_transformers(llama, 2, SETTINGS[1:3], [0, 3], engine)


def test_a_draft_that_agrees_saves_passes_of_the_target(llama: Pair, tmp_path: Path) -> None:
    params = SamplingParams(max_new_tokens=TOKENS, num_beams=4, ignore_eos=True)
    with Decoder.open(noisy_draft(llama.bundle, tmp_path / "bundle", noise=0.003)) as decoder:
        [plain] = decoder.generate([[7, 8, 9]], params, draft_length=0)
        [drafted] = decoder.generate([[7, 8, 9]], params, draft_length=4)
    assert drafted.token_ids == plain.token_ids
    # The first step goes by the logits after the prompt.
    assert (plain.speculation.rounds, plain.speculation.passes_saved) == (TOKENS - 1, 0)
    assert drafted.speculation.rounds + drafted.speculation.passes_saved == TOKENS - 1
    assert drafted.speculation.passes_saved > TOKENS // 4


def test_beams_search_beside_other_requests_and_change_no_text_of_theirs(llama: Pair) -> None:
    beams, greedy = ours({"num_beams": 4}, max_new_tokens=TOKENS), SamplingParams(max_new_tokens=40)
    sampled = SamplingParams(max_new_tokens=40, temperature=0.9, seed=3)
    asked = [beams, greedy, sampled, beams, greedy, beams]
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        alone = [decoder.generate([prompt], one)[0] for prompt, one in zip(prompts(6), asked, strict=True)]
    with Decoder.open(llama.bundle, max_batch=4) as decoder:
        together = decoder.generate(prompts(6), asked)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.beams for one in together] == [one.beams for one in alone]


def test_a_search_that_gives_up_its_place_begins_again(llama: Pair) -> None:
    params = ours({"num_beams": 4}, max_new_tokens=TOKENS)
    with Decoder.open(llama.bundle, max_batch=3) as decoder:
        expected = decoder.generate(prompts(5), params, draft_length=2)
        requests = [decoder.submit(prompt, params, draft_length=2) for prompt in prompts(5)]
        preempted = 0
        for turn in range(1000):
            if not decoder.step():
                break
            if turn % 4 == 3 and preempted < 4 and len(decoder._scheduler.seating.searching) > 1:
                with decoder.between_rounds():
                    decoder._scheduler.seating.preempt(CacheFull("somebody else needs the memory"))
                preempted += 1
        assert preempted == 4
    assert [request.output().beams for request in requests] == [one.beams for one in expected]


def test_a_search_can_be_cancelled_and_leaves_its_prompt_for_others(llama: Pair) -> None:
    prompt = [2 + place % 50 for place in range(100)]
    params = ours({"num_beams": 4}, max_new_tokens=TOKENS)
    with Decoder.open(llama.bundle, max_batch=2, prefix_bytes=1 << 22) as decoder:
        request = decoder.submit(prompt, params)
        for _ in range(4):
            decoder.step()
        decoder.cancel(request)
        decoder.step()
        assert request.output().finish_reason == "cancelled"
        assert not request.output().beams
        [again] = decoder.generate([prompt], params)
        [greedy] = decoder.generate([prompt], SamplingParams(max_new_tokens=TOKENS))
        assert again.usage.cached_tokens > 0
        assert greedy.usage.cached_tokens > 0
    with Decoder.open(llama.bundle) as decoder:
        assert decoder.generate([prompt], params)[0].beams == again.beams
        assert decoder.generate([prompt], SamplingParams(max_new_tokens=TOKENS))[0].token_ids == greedy.token_ids


def test_what_beams_have_left_in_a_row_is_kept_for_nobody(llama: Pair) -> None:
    """Their entries are no text in order, but for the prompt's."""
    params = SamplingParams(max_new_tokens=80, num_beams=8, ignore_eos=True)
    greedy = SamplingParams(max_new_tokens=8, ignore_eos=True)
    with Decoder.open(llama.bundle, prefix_bytes=1 << 22) as decoder:
        for prompt in prompts(4):
            [found] = decoder.generate([prompt], params)
            longer = [*prompt, *found.token_ids]
            [after] = decoder.generate([longer], greedy)
            decoder.forget_outputs()
            [plain] = decoder.generate([longer], greedy)
            decoder.forget_outputs()
            assert after.usage.cached_tokens <= len(prompt)
            assert after.token_ids == plain.token_ids


def test_short_searches_end_where_they_should(llama: Pair) -> None:
    with Decoder.open(llama.bundle) as decoder:
        for tokens in (1, 2, 3):
            params = ours({"num_beams": 3}, max_new_tokens=tokens, ignore_eos=True)
            [output] = decoder.generate([[9]], params, draft_length=4)
            assert [len(beam.token_ids) for beam in output.beams] == [tokens] * 3
            assert {beam.finish_reason for beam in output.beams} == {"length"}


def test_a_bias_is_added_to_log_probabilities(llama: Pair) -> None:
    """transformers adds it after the softmax, and so do beams."""
    bias = {7: 2.0, 8: -3.0}
    with Decoder.open(llama.bundle) as decoder:
        params = ours({"num_beams": 4}, max_new_tokens=TOKENS, ignore_eos=True, logit_bias=bias)
        outputs = [decoder.generate([[4, 5, 6]], params, draft_length=length)[0] for length in (0, 3)]
    asked = {"num_beams": 4, "sequence_bias": [[[token], value] for token, value in bias.items()]}
    expected = by_transformers(llama, [4, 5, 6], [], asked)
    for output in outputs:
        assert_theirs(output, expected)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"num_beams": 0}, "num_beams is 0, expected a whole number from 1 to 32"),
        ({"num_return_sequences": 2}, "num_return_sequences is 2, expected a whole number from 1 to num_beams, 1"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon', expected true, false or never"),
        ({"length_penalty": float("inf")}, "length_penalty is inf, expected a number from -16 to 16"),
        ({"num_beams": 2, "temperature": 1.0}, "beam search goes without temperature"),
        ({"num_beams": 2, "stop": ["x"]}, "beam search goes without stop"),
        ({"num_beams": 2, "logprobs": 1}, "beam search goes without logprobs"),
        ({"num_beams": 2, "repetition_penalty": 1.5}, "beam search goes without repetition_penalty"),
    ],
)
def test_what_a_search_does_not_know_is_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**params)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"drafter": "lookup"}, "num_beams needs drafter model or none, not lookup"),
        ({"draft_length": "3+2"}, r"draft_length is '3\+2', expected beside num_beams how many tokens"),
        ({"draft_length": "auto"}, "draft_length is 'auto', expected beside num_beams how many tokens"),
        ({"draft_length": 17}, "draft_length is 17, expected beside num_beams"),
    ],
)
def test_drafts_that_cannot_search_are_refused_by_name(llama: Pair, asked: dict[str, Any], message: str) -> None:
    with Decoder.open(llama.bundle) as decoder, pytest.raises(RequestError, match=message):
        decoder.submit([3, 4], SamplingParams(num_beams=2), **asked)


def test_more_beams_than_a_step_has_tokens_for_are_refused(llama: Pair) -> None:
    params = SamplingParams(num_beams=32, stop_token_ids=[3, 4, 5])
    with Decoder.open(llama.bundle) as decoder, pytest.raises(RequestError, match="whose steps look at 160 tokens"):
        decoder.submit([3, 4], params)


def test_beams_that_never_fit_into_the_budget_are_refused(llama: Pair) -> None:
    with Decoder.open(llama.bundle, max_batch=1, cache_bytes=1 << 20) as decoder:
        decoder.submit([3, 4], SamplingParams(max_new_tokens=100))
        with pytest.raises(RequestError, match="need more cache than cache_bytes allows"):
            decoder.submit([3, 4], SamplingParams(max_new_tokens=100, num_beams=16))


def test_a_search_ends_with_an_error_where_a_model_gives_no_numbers(llama: Pair, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(llama.bundle, tmp_path / "bundle"))
    rewrite_graph(bundle, "target", bundle / "target" / "model.onnx", lambda weights: weights * np.nan)
    resave(bundle)
    with Decoder.open(bundle) as decoder, pytest.raises(RequestError, match="a model gives no numbers"):
        decoder.generate([[3, 4]], SamplingParams(num_beams=2))


def test_padding_behind_the_vocabulary_is_never_said(tmp_path: Path) -> None:
    pair = export_pair(tiny_llama(tmp_path / "checkpoint", padded_vocab=VOCAB + 16), tmp_path / "bundle")
    with Decoder.open(noisy_draft(pair.bundle, tmp_path / "drafted", noise=0.1)) as decoder:
        params = ours({"num_beams": 8}, max_new_tokens=TOKENS, ignore_eos=True)
        plain, drafted = (decoder.generate(prompts(3), params, draft_length=length) for length in (0, 3))
    for one, other in zip(plain, drafted, strict=True):
        assert_theirs(other, ([list(beam.token_ids) for beam in one.beams], [beam.score for beam in one.beams]))
    assert all(token < VOCAB for one in plain for beam in one.beams for token in beam.token_ids)
