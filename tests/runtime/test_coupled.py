"""The coupled rule: one seed gives one text, whatever the draft, K, drafter and batch; one request's output never
depends on another's."""

import random
from dataclasses import replace

import pytest
import torch
from trt_spec.runtime import Decoder, EntropyRule, SamplingParams
from trt_spec.runtime.state.noise import gumbels

from ..kit.arbiter import arbiter_of
from ..kit.bundles import DRAFTERS_OF_A_PAIR, Pair
from ..kit.costs import known_costs
from ..kit.prompts import random_prompts
from ..kit.recorded import read
from ..kit.squares import BATCHES, Run, in_a_square

ENTROPY = EntropyRule(shortest=1, longest=6, stop_above=0.9)
COUPLED = SamplingParams(temperature=1.0, rule="coupled", max_new_tokens=32)
KINDS = {
    "greedy": SamplingParams(max_new_tokens=24),
    "coupled": SamplingParams(temperature=1.0, rule="coupled", max_new_tokens=24, top_p=0.95),
    "rejection": SamplingParams(temperature=1.0, max_new_tokens=24, min_p=0.02, frequency_penalty=0.1),
}


def noisy(seed: int):
    """The scores the coupled rule compares: log-probabilities at temperature 1 with the noise of the index drawn."""

    def score(logits: torch.Tensor, context) -> torch.Tensor:
        key = torch.tensor([[seed & 0xFFFFFFFF, seed >> 32]])
        return logits + gumbels(key, torch.tensor([[len(context)]]), len(logits))[0, 0]

    return score


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_one_seed_gives_one_text_for_every_draft_length_drafter_and_batch(pairs, family: str):
    """Tiny float32 models: no noisy scores are near enough to swap, so no difference is excused."""
    pair = pairs(family)
    prompts = random_prompts(64, [2, 5, 9, 23], seed=8)
    params = [replace(COUPLED, seed=seed) for seed in (0, 1, 2**40, 2**64 - 1)]
    with Decoder.open(pair.bundle, max_batch=1) as decoder:
        expected = [output.token_ids for output in decoder.generate(prompts, params, draft_length=0)]
    assert len(set(expected)) == len(expected)
    for batch in (1, 4):
        with known_costs(), Decoder.open(pair.bundle, max_batch=batch) as decoder:
            settings = [("model", 1), ("model", 8), *((drafter, 3) for drafter in DRAFTERS_OF_A_PAIR[: 2 * batch])]
            for drafter, k in [*settings, ("model", "auto"), ("mixed", "auto"), ("model", ENTROPY)]:
                outputs = decoder.generate(prompts, params, draft_length=k, drafter=drafter)
                assert [output.token_ids for output in outputs] == expected, f"batch {batch}, {drafter}, K {k}"
            assert 0 < decoder.speculation.accepted < decoder.speculation.examined


@pytest.mark.parametrize("draft_temperature", [0, 0.4])
def test_a_temperature_of_the_draft_changes_no_text(llama: Pair, draft_temperature: float):
    prompts = random_prompts(64, [5, 9], seed=8)
    with Decoder.open(llama.bundle) as decoder:
        plain, drafted = (
            decoder.generate(prompts, replace(COUPLED, seed=3, draft_temperature=own), draft_length=k)
            for own, k in ((None, 0), (draft_temperature, 4))
        )
        assert 0 < decoder.speculation.accepted < decoder.speculation.examined
    assert [output.token_ids for output in drafted] == [output.token_ids for output in plain]


def test_the_text_of_a_coupled_seed_is_that_of_the_noisy_argmax_of_transformers(llama: Pair):
    """The rule's definition, spelled out with the checkpoint and nothing of ours but the noise."""
    [prompt] = random_prompts(64, [6], seed=9)
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(16):
            logits = llama.reference(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(noisy(77)(logits, tokens).argmax()))
    with Decoder.open(llama.bundle) as decoder:
        [output] = decoder.generate([prompt], replace(COUPLED, seed=77, max_new_tokens=16, ignore_eos=True))
    assert list(output.token_ids) == tokens[6:]


@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_join_and_leave_in_random_order_say_what_they_say_alone(llama: Pair, kind: str):
    prompts = random_prompts(64, [3, 5, 8, 13, 21, 34, 4, 6, 9, 40], seed=10)
    choose = random.Random(11)
    params = [replace(KINDS[kind], seed=index, max_new_tokens=choose.randint(3, 24)) for index in range(len(prompts))]
    with Decoder.open(llama.bundle, max_batch=1) as decoder:
        alone = [decoder.generate([p], s, draft_length=3)[0] for p, s in zip(prompts, params, strict=True)]
    with Decoder.open(llama.bundle, max_batch=4) as decoder:
        requests, left = [], list(zip(prompts, params, strict=True))
        while left or not all(request.finished for request in requests):
            for prompt, setting in left[: choose.randint(0, 2)]:
                requests.append(decoder.submit(prompt, setting, draft_length=3))
                left.pop(0)
            if choose.random() < 0.2:  # one that is cancelled half way leaves no trace in the others
                decoder.cancel(decoder.submit(choose.choice(prompts), SamplingParams(), draft_length=3))
            bystander = decoder.submit([5, 6, 7], SamplingParams(), draft_length=3) if choose.random() < 0.2 else None
            decoder.step()
            if bystander is not None:
                decoder.cancel(bystander)
    for request, output in zip(requests, alone, strict=True):
        assert tuple(request.token_ids) == output.token_ids
        assert request.finish_reason == output.finish_reason


def test_a_comb_beside_a_longer_line_finds_room_wherever_they_begin(llama: Pair):
    """Their round is as wide as the longer line and all siblings: at some lengths the cache has to grow for both."""
    params = SamplingParams(temperature=1.0, rule="coupled", seed=2, ignore_eos=True, max_new_tokens=30)
    for length in range(100, 112):
        prompts = random_prompts(64, [length, length], seed=length)
        with Decoder.open(llama.bundle, max_batch=2) as decoder:
            expected = decoder.generate(prompts, params, draft_length=0)
        with Decoder.open(llama.bundle, max_batch=2) as decoder:  # whose cache is as short as it can be
            requests = [
                decoder.submit(prompt, params, draft_length=k, drafter="random")
                for prompt, k in zip(prompts, ("1+3", 16), strict=True)
            ]
            while decoder.step():
                pass
        assert [request.output().token_ids for request in requests] == [output.token_ids for output in expected]


@pytest.mark.exhaustive
@pytest.mark.long
def test_one_seed_gives_one_text_on_the_demo_pair(demo: Pair):
    """20 prompts × 96 tokens, each by each drafter in each batch, every time with another of five K, and plainly in a
    batch; at most one of the 20 may differ by an arbitrated near tie."""
    arbiter, excused, different = arbiter_of(demo), [], set()
    prompts = read().prompts[:20]
    params = [replace(COUPLED, seed=100 + index, max_new_tokens=96) for index in range(20)]
    with Decoder.open(demo.bundle, max_batch=1) as decoder:
        expected = [output.token_ids for output in decoder.generate(prompts, params, draft_length=0)]
    runs = [Run(4, "none", 0, range(20)), *in_a_square(20, ("model", "lookup"))]
    for batch in BATCHES:
        with Decoder.open(demo.bundle, max_batch=batch) as decoder:
            for _, drafter, k, numbers in (run for run in runs if run.batch == batch):
                asked = [prompts[number] for number in numbers], [params[number] for number in numbers]
                outputs = decoder.generate(*asked, draft_length=k, drafter=drafter)
                for number, output in zip(numbers, outputs, strict=True):
                    difference = arbiter.judge(
                        prompts[number], params[number], output.token_ids, expected[number], k + 1, batch
                    )
                    if difference is not None:
                        assert difference.near_tie, difference
                        excused.append(str(difference))
                        different.add(number)
    print(f"excused near ties of the coupled rule: {excused}")
    assert len(different) <= 1
