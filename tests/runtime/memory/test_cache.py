"""Whatever rounds did to a cache, its live part equals that of a fresh prefill."""

import random
from dataclasses import replace

import pytest
import torch
from trt_spec.engines import GRANULE, Bundle
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.row_cache import RowCache
from trt_spec.tools.certificate.probe import Probe

from ...kit.bundles import Pair
from ...kit.caches import probes, require_all_fresh
from ...kit.prompts import random_prompts


@pytest.fixture(scope="module")
def fresh(llama: Pair) -> dict[str, Probe]:
    """Of target and draft; the twin's draft is the target."""
    return probes(llama)


@pytest.mark.parametrize(("engine", "batch"), [("onnxruntime", 1), ("onnxruntime", 4), ("openvino", 4)])
def test_caches_equal_a_fresh_prefill_after_random_rounds(llama: Pair, fresh, engine: str, batch: int):
    """Random accepts and rollbacks, draft lengths and drafters, requests that come and go, buffers that grow."""
    choose = random.Random(batch)
    lengths = [choose.choice([1, 2, 3, 10, 50, 70]) for _ in range(3 * batch)]
    params = SamplingParams(temperature=1.0, max_new_tokens=60, ignore_eos=True, seed=batch)
    with Decoder.open(llama.bundle, engine, max_batch=batch) as decoder:
        requests = [decoder.submit(prompt, params) for prompt in random_prompts(64, lengths, seed=batch)]
        while decoder.step():
            require_all_fresh(decoder, requests, fresh)
            for request in requests:
                if choose.random() < 0.4:
                    # lookup compares up to four tokens
                    others = ["none", "suffix", "ngram", "random"] + ["lookup"] * (request.length > 4)
                    request.draft(choose.choice([0, 1, 2, 5, 9]), choose.choice(["model", "cascade"] * 3 + others))
                if choose.random() < 0.01:
                    decoder.cancel(request)
        assert 0 < decoder.speculation.accepted < decoder.speculation.examined


def test_the_draft_has_no_hole_after_full_acceptance(twin: Pair, fresh):
    """Pitfall 1: a draft that is the target is always right, so every round accepts all; its cache stays complete."""
    both = {"target": fresh["target"], "draft": fresh["target"]}
    [prompt] = random_prompts(64, [9], seed=2)
    for k in (1, 2, 5):
        with Decoder.open(twin.bundle) as decoder:
            params = SamplingParams(max_new_tokens=1 + 12 * (k + 1), ignore_eos=True)
            request = decoder.submit(prompt, params, draft_length=k)
            while decoder.step():
                require_all_fresh(decoder, [request], both)
            assert request.speculation.acceptance == 1.0
            assert request.speculation.rounds == 12, "the first token comes with the prompt"
            assert request.speculation.histogram == [0] * k + [12]


@pytest.mark.parametrize("params", [SamplingParams(temperature=1.0, rule="coupled"), SamplingParams(temperature=1.0)])
def test_a_draft_that_is_the_target_is_accepted_under_sampling_too(twin: Pair, params: SamplingParams):
    """p and q differ by rounding only, 1e-6 of probability at most, so of 300 proposals none is rejected."""
    with Decoder.open(twin.bundle) as decoder:
        decoder.generate(
            random_prompts(64, [9, 5, 30], seed=2),
            SamplingParams(temperature=1.0, rule=params.rule, max_new_tokens=120, ignore_eos=True, seed=3),
        )
        assert decoder.speculation.examined >= 280
        assert decoder.speculation.acceptance == 1.0


def test_a_draft_that_sat_out_rounds_beside_a_drafting_neighbour_has_no_hole(twin: Pair, fresh):
    """Pitfall 19: a row with K = 0, one that copies, and one that drafts, in every order."""
    both = {"target": fresh["target"], "draft": fresh["target"]}
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    prompts = random_prompts(64, [9, 11], seed=6)
    for drafters in (("model", "lookup"), ("lookup", "model"), ("model", "none")):
        with Decoder.open(twin.bundle) as decoder:
            requests = [
                decoder.submit(prompt, params, draft_length=k, drafter=drafter)
                for prompt, drafter, k in zip(prompts, drafters, (0, 4), strict=True)
            ]
            for _ in range(5):
                decoder.step()
                require_all_fresh(decoder, requests, both)
            requests[0].draft(4, "model")
            for _ in range(3):
                decoder.step()
                require_all_fresh(decoder, requests, both)
            assert requests[0].speculation.acceptance == 1.0
            for request in requests:
                decoder.cancel(request)


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.3, seed=1)])
def test_a_cascade_of_a_draft_that_is_the_target_is_always_right_and_has_no_hole(
    twin: Pair, fresh, params: SamplingParams
):
    """Whatever the copy proposes to the draft; beside a row that drafts step by step."""
    both = {"target": fresh["target"], "draft": fresh["target"]}
    prompts = [prompt * 2 for prompt in random_prompts(64, [9, 11, 4], seed=6)]
    params = replace(params, max_new_tokens=60, ignore_eos=True)
    with Decoder.open(twin.bundle) as decoder:
        requests = [
            decoder.submit(prompt, params, draft_length=k, drafter=drafter)
            for prompt, drafter, k in zip(prompts, ("cascade", "model", "cascade"), (5, 3, 1), strict=True)
        ]
        while decoder.step():
            require_all_fresh(decoder, requests, both)
    assert all(request.speculation.acceptance == 1.0 for request in requests)
    assert requests[0].speculation.tokens_per_round > 2


def test_rejected_rows_leave_no_trace(llama: Pair):
    """Greedy again from the state a sampled, much rejected run left behind: same tokens as from a new decoder."""
    prompts = random_prompts(64, [8, 15, 22], seed=7)
    params = SamplingParams(max_new_tokens=30)
    with Decoder.open(llama.bundle) as decoder:
        expected = decoder.generate(prompts, params)
    with Decoder.open(llama.bundle) as decoder:
        wild = SamplingParams(temperature=3.0, max_new_tokens=60, ignore_eos=True, seed=1)
        decoder.generate(random_prompts(64, [30, 31, 32, 33], seed=8), wild, draft_length=9)
        assert decoder.speculation.accepted < decoder.speculation.examined
        found = decoder.generate(prompts, params)
    assert [output.token_ids for output in found] == [output.token_ids for output in expected]


def test_caches_that_grow_and_shrink_keep_what_is_live(llama: Pair, fresh):
    """A long neighbour comes and goes, so the buffers grow by rows and by length, and shrink again."""
    params = SamplingParams(max_new_tokens=100, ignore_eos=True)
    with Decoder.open(llama.bundle, max_batch=16) as decoder:
        first = decoder.submit([5, 6, 7, 8, 9], params)
        sizes = set()
        for step in range(30):
            if step == 3:
                others = [
                    decoder.submit([7] * 150, SamplingParams(max_new_tokens=9, ignore_eos=True)) for _ in range(9)
                ]
            decoder.step()
            sizes.add((decoder.target.cache.rows, decoder.target.cache.capacity))
            require_all_fresh(decoder, [first, *others] if step >= 3 else [first], fresh)
        while not first.finished:
            decoder.step()
        [alone] = decoder.generate([[5, 6, 7, 8, 9]], params)
    assert len(sizes) > 2, "the buffers must have changed"
    assert tuple(first.token_ids) == alone.token_ids


def test_a_cache_keeps_its_live_rows_when_it_is_resized(llama: Pair):
    contract = Bundle.open(llama.bundle).target.contract
    cache = RowCache(contract, "cpu", 8, 2)
    for buffer in cache.buffers.values():
        buffer.copy_(torch.randn_like(buffer))
    before = {name: buffer.clone() for name, buffer in cache.buffers.items()}
    cache.entries[:2] = 10, GRANULE
    version = cache.version
    cache.fit(5, 100)
    assert cache.version == version + 1
    assert cache.rows >= 5
    assert cache.capacity >= 100
    assert cache.capacity % GRANULE == 0
    cache.move(1, 4)
    assert cache.entries[:5] == [10, 0, 0, 0, GRANULE]
    for name, buffer in cache.buffers.items():
        assert torch.equal(buffer[0, :, :10], before[name][0, :, :10])
        assert torch.equal(buffer[4, :, :GRANULE], before[name][1])
        assert torch.isfinite(buffer).all(), "masked entries are multiplied by zero, so they must be finite"
    cache.fit(5, 100)
    assert cache.version == version + 1, "there was room"
    cache.entries[4] = 0
    cache.fit(1, 10)
    assert (cache.rows, cache.capacity) == (1, GRANULE), "memory that is far too much is given back"
    assert torch.equal(cache.buffers["key_0"][0, :, :10], before["key_0"][0, :, :10])
