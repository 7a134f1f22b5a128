"""Copying drafters give several continuations, each with another first token; no text depends on them."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from weakref import ref

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trt_spec.runtime import Decoder, SamplingParams, Speculation
from trt_spec.runtime.drafters.suffix import PER_MATCHED_TOKEN
from trt_spec.runtime.drafters.suffix_automaton import MATCHES, SuffixAutomaton
from trt_spec.runtime.state.proposal import Proposal
from trt_spec.runtime.state.shapes import MOST_LINES
from trt_spec.tools.prompts.shipped import bench_prompts

from ...kit.bundles import Pair
from ...kit.chi_squared import p_value_of
from ...kit.copying import TEXTS, Asking, look_up, suffix_drafter
from ...kit.exact import SETTINGS
from ...kit.prompts import random_prompts
from ...kit.rules import RULES
from ...kit.sampled import FALSE_ALARM
from ..scripted import scripted_decoder

GREEDY = SamplingParams(max_new_tokens=40, ignore_eos=True)
OF_SUFFIX, OF_LOOKUP = "suffix+suffix+suffix", "lookup+lookup+lookup"


def slow_lookups(context: list[int], k: int, longest: int = 4) -> list[list[int]]:
    """All continuations by a search of every length and position."""
    found: dict[int, list[int]] = {}
    for size in range(min(longest, len(context) - 1), 0, -1):
        for end in range(len(context) - 1, size - 1, -1):
            if context[end - size : end] == context[-size:]:
                period = len(context) - end
                found.setdefault(context[end], [context[end + ahead % period] for ahead in range(k)])
    return list(found.values())


def test_each_lookup_is_the_best_match_that_another_token_followed():
    assert look_up([7, 10, 11, 7, 20, 21, 7], copy=1) == [[10, 11, 7]]
    assert look_up([1, 2, 3, 1, 2, 4, 5, 2, 6, 1, 2], copy=2) == [[6, 1, 2]], "a shorter match, though it is later"
    assert look_up([7, 10, 11, 7, 20, 21, 7], [1, 2, 3], copy=2) == [[], []]


@settings(max_examples=25)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4))
def test_lookups_equal_a_slow_search(contexts: list[list[int]]):
    expected = [slow_lookups(context, 5) for context in contexts]
    for better in range(MOST_LINES):
        found = look_up(*contexts, k=5, copy=better)
        assert found == [next(islice(each, better, None), []) for each in expected]


def suggestions(asking: Asking, most: int, *ended: Asking) -> list[list[int]]:
    """What is suggested first, and all other continuations."""
    drafter = suffix_drafter(*ended)
    return [drafter.suggest(asking, most), *drafter._others[asking]]


def copies(text: list[int], said: list[int], most: int) -> dict[int, tuple[int, list[list[int]]]]:
    """Of each token that ever followed an end of the text: the length of the longest, and all copies from there on."""
    found: dict[int, tuple[int, list[list[int]]]] = {}
    for one in (text, said):
        for at, token in enumerate(one):
            matched = sum(1 for size in range(1, at + 1) if one[at - size : at] == text[-size:])
            count = min(most, PER_MATCHED_TOKEN * matched)
            copy = [one[at + ahead % (len(one) - at)] for ahead in range(count)] if one is text else one[at:][:count]
            longest, known = found.get(token, (0, []))
            if matched > longest:
                found[token] = matched, [copy]
            elif matched:
                known.append(copy)
    return {token: each for token, each in found.items() if each[0]}


@given(TEXTS.filter(bool), TEXTS)
def test_suffixes_are_all_that_ever_followed_an_end_of_the_context(text: list[int], said: list[int]):
    """Each first token once, after the longest match that it ever followed, and as long as that match is worth."""
    first, *others = suggestions(Asking(tuple(text)), 6, Asking((), said))
    expected = copies(text, said, 6)
    assert sorted(one[0] for one in (first, *others) if one) == sorted(expected)
    assert all(one in expected[one[0]][1] for one in others)
    matched = [expected[one[0]][0] for one in others]
    assert matched == sorted(matched, reverse=True)


def test_a_text_that_repeats_itself_is_not_looked_through_to_its_shortest_match():
    automaton = SuffixAutomaton(1000)
    automaton.extend([7] * 1000)
    assert len([*automaton.following(automaton.matched, automaton.repeated)]) == MATCHES


def test_of_equally_long_matches_the_latest_goes_first_and_then_what_others_said():
    text = (5, 1, 5, 2, 5, 3, 5)
    assert suggestions(Asking(text), 2) == [[3, 5], [2, 5], [1, 5]]
    assert suggestions(Asking(text), 2, Asking((), [5, 4, 4, 4])) == [[3, 5], [2, 5], [1, 5], [4, 4]]
    assert suggestions(Asking((6, 1, 6, 5)), 4, Asking((), [6, 5, 7, 6, 5, 8])) == [[8], [7, 6, 5, 8]]
    assert suggestions(Asking((1, 2, 3)), 4) == [[]]


def test_earlier_outputs_give_no_continuation_where_they_may_not():
    """The text of a request that has chosen a seed depends on its proposals under rejection."""
    said = Asking((), [5, 4, 4, 4])
    for params, reads in ((GREEDY, True), (RULES["coupled"], True), (RULES["rejection"], False)):
        assert ([4, 4] in suggestions(Asking((5, 1, 5), params=params), 2, said)) == reads


def test_a_predicted_output_gives_several_continuations():
    """The first goes on where the prompt leads into it, none beyond its end."""
    assert suggestions(Asking((9, 5), prediction=(6, 1, 5, 7, 8, 5)), 3) == [[6, 1, 5], [7, 8]]


def a_coin_each_time(context: Sequence[int]) -> int:
    return random.Random(len(context)).choice(b"ab")


def test_the_second_continuation_stands_where_the_first_does_not(tmp_path: Path):
    """Of a text that always goes on in one of two ways, one of two continuations is right, whichever it is."""
    with scripted_decoder(tmp_path, a_coin_each_time) as decoder:
        for one in ("lookup", "suffix"):
            found = []
            for drafter in (one, f"{one}+{one}", f"{one}+{one}+{one}"):
                decoder.forget_outputs()
                found += decoder.generate([list(b"aabba")], GREEDY, draft_length=1, drafter=drafter)
            alone, two, three = found
            assert alone.speculation.acceptance < 0.7
            assert two.speculation.acceptance == three.speculation.acceptance == 1.0
            assert two.speculation.rounds == three.speculation.rounds < alone.speculation.rounds
            assert alone.token_ids == two.token_ids == three.token_ids


def test_ngrams_propose_several_continuations_as_a_comb(llama: Pair):
    prompts, rounds = random_prompts(64, [3] * 6, seed=3), {}
    with Decoder.open(llama.bundle) as decoder:
        expected = decoder.generate(prompts, GREEDY, draft_length=0)
        for length in (2, "2+3"):
            found = decoder.generate(prompts, GREEDY, draft_length=length, drafter="ngram")
            assert [one.token_ids for one in found] == [one.token_ids for one in expected]
            rounds[length] = sum(one.speculation.rounds for one in found)
    assert rounds["2+3"] < rounds[2]


@pytest.mark.parametrize("rule", RULES)
def test_rows_of_a_batch_have_different_continuations(llama: Pair, rule: str):
    """Each says what it says alone, whatever the rule."""
    drafters = (OF_SUFFIX, OF_LOOKUP, "model+suffix+suffix", "suffix", "suffix+suffix+lookup+lookup")
    prompts = [[3, 4, 5, 3, 6, 3, 4, 7, 3, row] for row in range(len(drafters))]
    with Decoder.open(llama.bundle) as decoder:
        alone = [
            decoder.generate([prompt], RULES[rule], draft_length=3, drafter=drafter)[0]
            for prompt, drafter in zip(prompts, drafters, strict=True)
        ]
        decoder.forget_outputs()
        requests = [
            decoder.submit(prompt, RULES[rule], draft_length=3, drafter=drafter)
            for prompt, drafter in zip(prompts, drafters, strict=True)
        ]
        while decoder.step():
            pass
    assert [tuple(one.token_ids) for one in requests] == [one.token_ids for one in alone]


@pytest.mark.parametrize("rule", RULES)
def test_a_seed_has_one_text_whatever_was_said_before(llama: Pair, rule: str):
    [prompt, other] = random_prompts(64, [12, 12], seed=3)
    with Decoder.open(llama.bundle) as decoder:
        [first] = decoder.generate([prompt], RULES[rule], drafter=OF_SUFFIX)
        decoder.generate([other, prompt, prompt[:6]], replace(RULES[rule], seed=9), drafter=OF_SUFFIX)
        [again] = decoder.generate([prompt], RULES[rule], drafter=OF_SUFFIX)
    assert again.token_ids == first.token_ids


# Each of eight tokens is followed by two others.
FOLLOWED = [token for i in range(8) for token in (i, (i + 3) % 8)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("settings", "rule", "drafter"),
    [
        ("filtered", "rejection", OF_SUFFIX),
        ("everything", "rejection", "model+lookup+lookup"),
        ("penalised", "tokenwise", "model+suffix+suffix"),
        ("plain", "tokenwise", OF_LOOKUP),
    ],
)
def test_output_is_distributed_as_the_target_alone(eight: Pair, settings: str, rule: str, drafter: str):
    assert p_value_of(eight, replace(SETTINGS[settings], rule=rule), 4_000, 2, drafter, 3, FOLLOWED) > FALSE_ALARM


@pytest.mark.exhaustive
def test_chi_squared_catches_continuations_that_are_tested_as_if_others_were_certain(
    eight: Pair, monkeypatch: pytest.MonkeyPatch
):
    def of_the_next(self: Proposal, distribution: Tensor, token: Tensor, vocab_size: int) -> Tensor:
        return drawn_from(self, distribution, (token + 1) % vocab_size, vocab_size)

    drawn_from = Proposal.drawn_from
    monkeypatch.setattr(Proposal, "drawn_from", of_the_next)
    assert p_value_of(eight, SETTINGS["filtered"], 4_000, 2, OF_SUFFIX, 3, FOLLOWED) < FALSE_ALARM


def test_the_matches_of_a_request_go_with_its_end_however_long_its_owner_keeps_it():
    drafter, request = suffix_drafter(), Asking((1, 2, 3, 1, 2))
    assert drafter.suggest(request, 4) == [3, 1, 2, 3]
    context = ref(drafter._contexts[request])
    assert context() is not None
    drafter.ended(request)
    assert context() is None


@pytest.mark.exhaustive
def test_greedy_text_of_the_demo_pair_is_worth_little_more_with_a_second_continuation(demo: Pair):
    """tools/docs/drafts.md has the numbers."""
    params = replace(GREEDY, max_new_tokens=128)
    with Decoder.open(demo.bundle, max_batch=1) as decoder:
        prompts = bench_prompts("python", decoder.vocab_size)
        for each in (("suffix", "suffix+suffix", OF_SUFFIX), ("lookup", "lookup+lookup", OF_LOOKUP)):
            found = []
            for drafter, length in (*((drafter, 4) for drafter in each), (each[0], 8)):
                decoder.forget_outputs()
                total = Speculation()
                for output in decoder.generate(prompts, params, draft_length=length, drafter=drafter):
                    total.add(output.speculation)
                found.append(total.tokens_per_round)
            assert found == sorted(set(found)), f"{each}: {found}"
            assert found[2] < 1.05 * found[0] < found[3]
