"""A request with a seed and a fixed length has one text, also where the rule lets its proposals decide."""

from dataclasses import replace

import pytest
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.full import CacheFull

from ..kit.bundles import Pair
from ..kit.caches import bytes_of
from ..kit.prompts import random_prompts

SHARED = 1100  # tokens at the beginning of all prompts, more than a draft reads between two rounds
RULES = ("rejection", "tokenwise")


def requests_of(rule: str) -> tuple[list[list[int]], list[SamplingParams]]:
    [beginning] = random_prompts(64, [SHARED], seed=1)
    prompts = [beginning + end for end in random_prompts(64, [40 + 3 * i for i in range(6)], seed=2)]
    params = SamplingParams(max_new_tokens=24, temperature=1.0, rule=rule, ignore_eos=True)
    return prompts, [replace(params, seed=i) for i in range(6)]


def alone(pair: Pair, rule: str, draft_length: int | str, drafter: str) -> list[tuple[int, ...]]:
    with Decoder.open(pair.bundle, max_batch=1) as decoder:
        each = zip(*requests_of(rule), strict=True)
        outputs = [decoder.generate(*one, draft_length=draft_length, drafter=drafter)[0] for one in each]
    return [output.token_ids for output in outputs]


def texts(decoder: Decoder, rule: str, draft_length: int | str, drafter: str) -> list[tuple[int, ...]]:
    """The first request leaves its prompt to the others, which then begin together."""
    requests = []
    for prompt, params in zip(*requests_of(rule), strict=True):
        requests.append(decoder.submit(prompt, params, draft_length=draft_length, drafter=drafter))
        while not requests[0].token_ids:
            decoder.step()
    while decoder.step():
        pass
    return [request.output().token_ids for request in requests]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("draft_length", "drafter"), [(4, "model"), ("3+2", "model"), ("3/6", "model"), (3, "model+lookup"), (4, "cascade")]
)
def test_a_seed_has_one_text_alone_in_a_batch_and_after_a_hit(
    lengthy: Pair, rule: str, draft_length: int | str, drafter: str
):
    expected = alone(lengthy, rule, draft_length, drafter)
    with Decoder.open(lengthy.bundle, max_batch=6, prefix_bytes=bytes_of(lengthy.bundle, 60)) as decoder:
        for _ in range(2):
            assert texts(decoder, rule, draft_length, drafter) == expected
        assert decoder.prefixes.found_tokens > 6 * SHARED // 2


@pytest.mark.parametrize(("rule", "drafter"), [*((rule, "model") for rule in RULES), ("tokenwise", "cascade")])
def test_it_is_the_same_after_preemption(lengthy: Pair, rule: str, drafter: str):
    """Wherever its place is taken: while its draft reads the prompt, too."""
    expected = alone(lengthy, rule, 4, drafter)
    for steps in (5, 20):
        with Decoder.open(lengthy.bundle, max_batch=6) as decoder:
            prompts, params = requests_of(rule)
            requests = [
                decoder.submit(*one, draft_length=4, drafter=drafter) for one in zip(prompts, params, strict=True)
            ]
            for _ in range(steps):
                decoder.step()
            for _ in range(min(3, len(decoder._scheduler.seating.occupants) - 1)):
                decoder._scheduler.seating.preempt(CacheFull("the test takes their places"))
            while decoder.step():
                pass
            assert [tuple(request.token_ids) for request in requests] == expected


def test_rows_that_change_places_keep_their_noise(lengthy: Pair):
    """A short prompt overtakes a long one, after its first token is drawn, and goes on in the other's row."""
    [long, short, other] = random_prompts(64, [1500, 30, 20], seed=3)
    params = SamplingParams(max_new_tokens=40, temperature=1.0, ignore_eos=True, seed=5)
    with Decoder.open(lengthy.bundle, max_batch=1) as decoder:
        [expected] = decoder.generate(short, params, draft_length=3)
    with Decoder.open(lengthy.bundle, max_batch=4) as decoder:
        decoder.submit(other, params, draft_length=3)
        decoder.step()
        decoder.submit(long, replace(params, seed=6), draft_length=3)
        decoder.step()
        request = decoder.submit(short, params, draft_length=3)
        seating = decoder._scheduler.seating
        seating.admit()
        seating.prefilling.reverse()  # as where the engine reads both in one call
        decoder.step()
        assert seating.live[1].request is request, "it has the row of the long one"
        while not request.finished:
            decoder.step()
    assert tuple(request.token_ids) == expected.token_ids
