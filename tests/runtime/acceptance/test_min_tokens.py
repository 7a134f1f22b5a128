"""No output ends before its minimum by the end-of-sequence token or a stop token, and may right after it."""

import math
from dataclasses import replace

import pytest
from trt_spec.runtime import Decoder, RequestError, SamplingParams

from ...kit.bundles import Pair

EOS = 1
EAGER = SamplingParams(logit_bias={EOS: 1000.0}, max_new_tokens=20)  # ends at once if it may


@pytest.fixture(scope="module")
def decoder(llama: Pair):
    with Decoder.open(llama.bundle, max_batch=3) as decoder:
        yield decoder


@pytest.mark.parametrize("draft_length", [0, 1, 4, 16])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "tokenwise"])
def test_the_end_comes_right_after_the_minimum_at_every_draft_length(decoder: Decoder, draft_length: int, rule: str):
    asked = [replace(EAGER, min_tokens=least, rule=rule, temperature=1.0, seed=least) for least in (0, 1, 7)]
    outputs = decoder.generate([[5, 6]] * 3, asked, draft_length=draft_length)
    assert [len(output.token_ids) for output in outputs] == [1, 2, 8]
    assert all(output.token_ids[-1] == EOS and EOS not in output.token_ids[:-1] for output in outputs)
    assert all(output.finish_reason == "stop" for output in outputs)


def test_a_stop_token_waits_for_the_minimum_too_and_ignore_eos_frees_the_end_of_sequence(decoder: Decoder):
    stop = replace(EAGER, logit_bias={9: 1000.0}, stop_token_ids=[9], min_tokens=3)
    free = replace(EAGER, min_tokens=20, ignore_eos=True)
    outputs = decoder.generate([[5, 6]] * 2, [stop, free])
    assert outputs[0].token_ids.index(9) == 3
    assert outputs[1].token_ids == (EOS,) * 20


def test_a_stop_text_ends_an_output_before_the_minimum(decoder: Decoder):
    a, b = (decoder.tokenizer.token_to_id(letter) for letter in "ab")
    says_a = replace(EAGER, logit_bias={a: 1000.0, b: 900.0}, min_tokens=10, stop=["aa"])
    [output] = decoder.generate([5, 6], says_a)
    assert (output.token_ids, output.text, output.finish_reason) == ((a, a), "", "stop")


def test_a_minimum_that_leaves_no_token_to_begin_with_is_refused(decoder: Decoder):
    banned = dict.fromkeys(range(2, 64), -math.inf)
    with pytest.raises(RequestError, match="min_tokens and logit_bias leave no token to begin with; ask for less"):
        decoder.submit([5], replace(EAGER, logit_bias=banned, stop_token_ids=[0], min_tokens=2))
