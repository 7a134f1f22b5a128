"""Where memory runs out the youngest request gives up its place, and later goes on with the same text."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from trt_spec.runtime import Decoder, EngineError, Grammar, SamplingParams
from trt_spec.runtime.requests.request import State

from ...kit.bundles import Pair
from ...kit.caches import bytes_of, memory_for
from ...kit.prompts import random_prompts

SETTINGS = [
    SamplingParams(max_new_tokens=90, ignore_eos=True),
    SamplingParams(max_new_tokens=90, ignore_eos=True, temperature=0.9, rule="coupled", seed=3),
    SamplingParams(max_new_tokens=90, ignore_eos=True, temperature=0.9, seed=3),
    SamplingParams(max_new_tokens=90, ignore_eos=True, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=2),
    SamplingParams(max_new_tokens=90, grammar=Grammar.regex("([a-f]{1,3} )*[a-f]+[0-9]{2}"), min_p=0.1),
    SamplingParams(max_new_tokens=90, stop_token_ids=[3, 4], min_tokens=60),
]


@pytest.mark.parametrize(
    ("engine", "entries", "kept"), [("onnxruntime", 700, 0), ("onnxruntime", 700, 20), ("openvino", 500, 0)]
)
@pytest.mark.parametrize("draft_length", [0, 3])
def test_requests_that_outgrow_the_memory_say_what_they_say_alone(
    llama: Pair, engine: str, entries: int, kept: int, draft_length: int
):
    prompts = random_prompts(64, [20, 90, 3, 40, 1, 60], seed=2)
    with Decoder.open(llama.bundle, max_batch=1) as alone:
        expected = [
            alone.generate(prompt, params, draft_length=draft_length)[0]
            for prompt, params in zip(prompts, SETTINGS, strict=True)
        ]
    with (
        patch("trt_spec.runtime.memory.block_cache.FIRST_BLOCKS", 4),
        memory_for(entries) as refused,
        Decoder.open(llama.bundle, engine, max_batch=6, prefix_bytes=bytes_of(llama.bundle, kept) or None) as decoder,
    ):
        requests = [
            decoder.submit(prompt, params, draft_length=draft_length)
            for prompt, params in zip(prompts, SETTINGS, strict=True)
        ]
        while not all(request.finished for request in requests):
            decoder.step()
        admitted = decoder._scheduler.seating._admitted
    assert refused
    assert admitted > len(requests), "some came twice"
    for request, right in zip(requests, expected, strict=True):
        found = request.output()
        assert (found.token_ids, found.text, found.finish_reason) == (right.token_ids, right.text, right.finish_reason)
        pieces = request.take()
        assert "".join(piece.text for piece in pieces) == right.text


def test_one_that_is_alone_ends_with_an_error_of_its_own(llama: Pair):
    [long, short] = random_prompts(64, [150, 10], seed=2)
    with memory_for(100), Decoder.open(llama.bundle, max_batch=4) as decoder:
        request = decoder.submit(long, SETTINGS[0])
        other = decoder.submit(short, SamplingParams(max_new_tokens=20, ignore_eos=True))
        while not other.finished or not request.finished:
            decoder.step()
        with pytest.raises(EngineError, match="no memory for a cache"):
            request.output()
        assert len(other.output().token_ids) == 20


@pytest.mark.parametrize("leaves", [False, True])
def test_a_prompt_that_gives_up_its_place_while_it_is_scored_misleads_nobody(lengthy: Pair, leaves: bool):
    """It goes on over nothing that its row no longer holds, nor leaves that to others."""
    [long, live] = random_prompts(64, [600, 20], seed=2)
    scored = SamplingParams(max_new_tokens=12, ignore_eos=True, prompt_logprobs=1)
    plain = replace(scored, prompt_logprobs=None)
    with Decoder.open(lengthy.bundle, max_batch=1) as alone:
        [expected] = alone.generate(long, scored, draft_length=0)
    kept = bytes_of(lengthy.bundle, 24)
    with memory_for(1000) as refused, Decoder.open(lengthy.bundle, max_batch=2, prefix_bytes=kept) as decoder:
        decoder.submit(live, replace(plain, max_new_tokens=30))
        decoder.step()
        request = decoder.submit(long, scored, draft_length=0)
        while not refused:
            decoder.step()
        assert request.state is State.WAITING
        assert 256 < len(request.prompt_logprobs) < 600, "some are known"
        while len(request.prompt_logprobs) != 1 + 2 * 256:
            decoder.step()
        if leaves:
            decoder.cancel(request)
            [found] = decoder.generate(long, plain, draft_length=0)
        else:
            while decoder.step():
                pass
            found = request.output()
            pairs = zip(found.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True)
            assert max(abs(ours.logprob - right.logprob) for ours, right in pairs) < 1e-4
    assert found.token_ids == expected.token_ids


def test_where_no_memory_is_left_to_change_rows_nothing_has_changed(lengthy: Pair):
    """A short prompt is read before a long one of which a part is read, and would go live in the long one's row."""
    prompts = random_prompts(64, [900, 1], seed=2)
    params = [SamplingParams(max_new_tokens=12, temperature=1.0, ignore_eos=True, seed=seed) for seed in range(2)]
    with Decoder.open(lengthy.bundle, max_batch=1) as alone:
        expected = [alone.generate(*one, draft_length=3)[0] for one in zip(prompts, params, strict=True)]
    with memory_for(1100) as refused, Decoder.open(lengthy.bundle, max_batch=2) as decoder:
        long = decoder.submit(prompts[0], params[0], draft_length=3)
        while decoder.target.cache.entries[0] < 256:
            decoder.step()
        assert long.state is State.PREFILLING
        short = decoder.submit(prompts[1], params[1], draft_length=3)
        while decoder.step():
            pass
    assert refused
    assert [one.output().token_ids for one in (long, short)] == [one.token_ids for one in expected]
