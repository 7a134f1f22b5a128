"""The suffix automaton finds what a slow search finds; what it suggests follows a match, and no seed is betrayed."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.drafters.suffix import LONGEST_MATCH, PER_MATCHED_TOKEN
from trt_spec.runtime.drafters.suffix_automaton import SuffixAutomaton

from ...kit.bundles import Pair
from ...kit.copying import TEXTS, Asking, suffix_drafter
from ...kit.prompts import random_prompts

SAMPLED = SamplingParams(temperature=1.0, max_new_tokens=24, ignore_eos=True)
COUPLED = replace(SAMPLED, rule="coupled", seed=5)


def longest_end(text: list[int], within: list[int]) -> int:
    """Tokens of the longest end of `text` that occurs in `within`, by trying all."""
    places = range(len(within) + 1)
    ends = (size for size in range(len(text), 0, -1) for at in places if within[at : at + size] == text[-size:])
    return next(ends, 0)


@given(TEXTS)
def test_after_every_token_the_match_is_the_longest_that_occurred_before(text: list[int]):
    automaton = SuffixAutomaton(1000)
    for read, token in enumerate(text, 1):
        automaton.extend([token])
        matched, end = automaton.matched, automaton.match_end
        assert matched == longest_end(text[1:read], text[: read - 1])
        if matched:
            assert end < read - 1
            assert text[end - matched + 1 : end + 1] == text[read - matched : read]


@given(TEXTS, TEXTS)
def test_the_longest_end_of_another_text_is_found_where_it_occurs(text: list[int], context: list[int]):
    automaton = SuffixAutomaton(1000)
    automaton.extend(text)
    matched, state = automaton.find(context)
    assert matched == longest_end(context, text)
    if matched:
        end = automaton.end(state)
        assert text[end - matched + 1 : end + 1] == context[-matched:]


@given(st.lists(TEXTS, max_size=6))
def test_only_the_latest_tokens_are_remembered(parts: list[list[int]]):
    automaton, read = SuffixAutomaton(10), []
    for part in parts:
        automaton.extend(part)
        read += part
        held = automaton.tokens
        assert automaton.read == len(read)
        assert min(5, len(read)) <= len(held) <= 10
        assert held == read[len(read) - len(held) :]
        assert automaton.matched == longest_end(held[1:], held[:-1])


@pytest.mark.parametrize("period", [1, 2, 97, 10**6])
def test_states_and_transitions_stay_in_proportion_to_the_tokens(period: int):
    """At most 2 n states and 3 n transitions, which is what makes a token cheap."""
    choose = random.Random(period)
    word = [choose.randrange(9) for _ in range(min(period, 5000))]
    automaton = SuffixAutomaton(10**4)
    automaton.extend([word[i % len(word)] for i in range(5000)])
    assert len(automaton._next) <= 2 * 5000
    assert sum(map(len, automaton._next)) <= 3 * 5000


# Suggestions.


def test_the_longer_the_match_the_more_is_suggested():
    text = (1, 2, 3, 4, 5, 6, 7, 8, 9)
    for matched in (1, 2, 3):
        suggested = suffix_drafter().suggest(Asking((*text, *text[:matched])), 16)
        assert suggested == [text[(matched + ahead) % 9] for ahead in range(PER_MATCHED_TOKEN * matched)]
    assert suffix_drafter().suggest(Asking((*text, *text[:5])), 3) == [6, 7, 8]
    assert suffix_drafter().suggest(Asking(text), 16) == []


def test_repetition_goes_on():
    assert suffix_drafter().suggest(Asking((1, 2, 1, 2)), 4) == [1, 2, 1, 2]


def test_what_the_request_said_itself_is_read_as_it_comes():
    suffixes, asking = suffix_drafter(), Asking((1, 2, 3))
    assert suffixes.suggest(asking, 2) == []
    asking.token_ids += [9, 8, 2, 3]
    assert suffixes.suggest(asking, 2) == [9, 8]
    asking.token_ids += [9]
    assert suffixes.suggest(asking, 2) == [8, 2]


def test_earlier_outputs_are_suggested_after_a_longer_match_than_the_contexts_own():
    suffixes = suffix_drafter(Asking((7, 1, 2, 3), [4, 5, 6]), Asking((1,), [50, 51]))
    assert suffixes.suggest(Asking((9, 1, 2)), 8) == [3, 4, 5, 6], "not beyond the end of that output"
    assert suffixes.suggest(Asking((2, 8, 8, 2)), 8) == [8, 8], "equally long: its own"
    assert suffixes.suggest(Asking((40, 51)), 8) == [], "nothing followed"
    long = list(range(100, 100 + 2 * LONGEST_MATCH))
    suffixes = suffix_drafter(Asking((1,), long))
    assert suffixes.suggest(Asking(tuple(long[:-4])), 8) == long[-4:]


@pytest.mark.parametrize(
    ("params", "reads"),
    [
        (SamplingParams(), True),
        (SamplingParams(seed=1), True),
        (SamplingParams(lenience=0.5), False),
        (SamplingParams(temperature=1.0), True),
        (SamplingParams(temperature=1.0, seed=1), False),
        (SamplingParams(temperature=1.0, seed=1, rule="coupled"), True),
    ],
)
def test_earlier_outputs_are_read_where_they_cannot_change_what_a_seed_promises(params: SamplingParams, reads: bool):
    suffixes = suffix_drafter(Asking((7, 1, 2, 3), [4, 5, 6]))
    assert suffixes.suggest(Asking((9, 1, 2), params=params), 2) == ([3, 4] if reads else [])


@pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=24), COUPLED, replace(SAMPLED, seed=5)])
def test_a_seed_has_one_text_whatever_was_said_before(llama: Pair, params: SamplingParams):
    """Also under rejection, where the draft decides on the text."""
    [prompt, other] = random_prompts(64, [12, 12], seed=3)
    with Decoder.open(llama.bundle) as decoder:
        [first] = decoder.generate(prompt, params, drafter="suffix")
        decoder.generate([other, prompt, prompt[:6]], replace(params, seed=9), drafter="suffix")
        [again] = decoder.generate(prompt, params, drafter="suffix")
    assert again.token_ids == first.token_ids


def test_a_text_that_was_said_before_is_proposed_whole(llama: Pair):
    [prompt] = random_prompts(64, [12], seed=3)
    params = SamplingParams(max_new_tokens=42, ignore_eos=True)
    with Decoder.open(llama.bundle) as decoder:
        first, again = (decoder.generate(prompt, params, draft_length=4, drafter="suffix")[0] for _ in range(2))
    assert again.token_ids == first.token_ids
    assert again.speculation.acceptance == 1.0
    assert again.speculation.rounds == 9, "a token with the prompt, then five a round"


def test_a_round_is_as_wide_as_what_is_suggested(llama: Pair):
    with Decoder.open(llama.bundle) as decoder:
        bias = {6: 100.0}  # the first token, which comes with the prompt, repeats what followed before
        params = SamplingParams(max_new_tokens=30, logit_bias=bias)
        request = decoder.submit([5, 6, 7, 8, 5], params, draft_length=8, drafter="suffix")
        widths = []
        for _ in range(2):
            before = request.speculation.proposed
            decoder.step()
            widths.append((decoder.last_frame.lines[0].proposed.shape[1], request.speculation.proposed - before))
    assert widths[0] == (2 * PER_MATCHED_TOKEN, 2 * PER_MATCHED_TOKEN)
    assert all(width == proposed for width, proposed in widths)


def test_what_was_said_can_be_forgotten(llama: Pair):
    [prompt] = random_prompts(64, [12], seed=3)
    params = SamplingParams(max_new_tokens=41, ignore_eos=True)
    with Decoder.open(llama.bundle) as decoder:
        [first] = decoder.generate(prompt, params, draft_length=4, drafter="suffix")
        decoder.forget_outputs()
        [again] = decoder.generate(prompt, params, draft_length=4, drafter="suffix")
    assert again.speculation.rounds == first.speculation.rounds > 9
