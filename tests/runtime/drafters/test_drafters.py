"""Lookup copies what followed the latest of the longest earlier matches; the model drafts what its scores say."""

import pytest
import torch
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.acceptance.seat import admit
from trt_spec.runtime.drafters.lookup import LONGEST_MATCH
from trt_spec.runtime.drafters.lookup import look_up as copy_by_lookup

from ...kit.bundles import Pair
from ...kit.copying import look_up
from ...kit.prompts import random_prompts
from ...kit.steps import feed
from ..states import make_plan, make_rows


def slow_lookup(context: list[int], k: int) -> list[int]:
    """The same by a search of every length and position."""
    for size in range(min(LONGEST_MATCH, len(context) - 1), 0, -1):
        for end in range(len(context) - 1, size - 1, -1):
            if context[end - size : end] == context[-size:]:
                grown = list(context)
                for ahead in range(k):
                    grown.append(grown[end + ahead])
                return grown[len(context) :]
    return []


def test_lookup_copies_what_followed_the_longest_match():
    assert look_up([1, 2, 3, 50, 51, 52, 9, 3, 60, 61, 62, 8, 1, 2, 3]) == [[50, 51, 52]]


def test_of_equally_long_matches_the_latest_wins():
    assert look_up([7, 10, 11, 12, 7, 20, 21, 22, 7]) == [[20, 21, 22]]


def test_a_match_that_ends_less_than_k_tokens_ago_goes_on_into_its_own_copy():
    assert look_up([1, 2, 1, 2], [5, 5, 5, 5], k=5) == [[1, 2, 1, 2, 1], [5, 5, 5, 5, 5]]


def test_nothing_is_proposed_where_nothing_matches():
    assert look_up([1, 2, 3, 4, 5, 6]) == [[]]


@pytest.mark.parametrize("context", [[4], [4, 4], [4, 5], [4, 5, 4], [4, 4, 4], [1, 2, 3, 2]])
def test_lookup_works_in_contexts_shorter_than_what_it_compares(context: list[int]):
    assert look_up(context) == [slow_lookup(context, 3)]


def test_lookup_equals_a_slow_search_in_random_ragged_batches():
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        lengths = torch.randint(1, 40, (5,), generator=generator).clamp(min=4).tolist()
        contexts = [torch.randint(0, 4, (length,), generator=generator).tolist() for length in lengths]
        assert look_up(*contexts, k=6) == [slow_lookup(context, 6) for context in contexts]


def test_a_source_is_copied_from_its_beginning_and_where_it_agrees_longer_than_the_text():
    source = [7, 8, 9, 1, 2, 3, 4]
    assert look_up([0], sources=[source]) == [[7, 8, 9]]
    assert look_up([0, 5, 9, 6, 8, 9], sources=[source]) == [[1, 2, 3]]
    assert look_up([0, 5, 9, 6, 9], sources=[source]) == [[6, 9, 6]], "of equally long matches the latest wins"
    assert look_up([0, 5], sources=[source]) == [[]]


def test_lookup_in_sources_equals_a_slow_search_beside_neighbours_with_longer_ones():
    generator = torch.Generator().manual_seed(0)

    def texts(shortest: int) -> list[list[int]]:
        lengths = torch.randint(shortest, 20, (5,), generator=generator).tolist()
        return [torch.randint(0, 4, (length,), generator=generator).tolist() for length in lengths]

    for copy in (0, 1):
        for _ in range(30):
            contexts, sources = texts(1), texts(0)
            found = look_up(*contexts, k=6, copy=copy, sources=sources)
            alone = [look_up(one, k=6, copy=copy, sources=[own])[0] for one, own in zip(contexts, sources, strict=True)]
            assert found == alone
            if not copy:
                wholes = [[one[0], *own, *one] for one, own in zip(contexts, sources, strict=True)]
                assert found == [slow_lookup(whole, 6) for whole in wholes]


def test_a_copy_beyond_the_last_match_is_of_tokens_beside_a_longer_source():
    params = [SamplingParams()] * 2
    rows = make_rows(params, 100, [[1], [1]])
    for row, source in enumerate([[5], [6, 7, 8, 6, 7, 8]]):
        rows.note_source(row, [1], source)
    for tokens, _ in copy_by_lookup(rows, make_plan(params, 4), 8, copies=4):
        assert tokens.min() >= 0


def test_the_source_of_a_row_moves_and_swaps_with_it_and_makes_room_for_a_longer_one():
    rows = make_rows([SamplingParams()] * 3, 100)
    for row, source in enumerate([[5], [6, 7, 8], [9, 9]]):
        rows.note_source(row, [1, 2], source)
    assert rows.source.tolist() == [[-1, -1, 1, 2, 5], [1, 2, 6, 7, 8], [-1, 1, 2, 9, 9]]
    rows.move(2, 0)
    rows.swap(0, 1)
    rows.note_source(2, [1, 2], [3])
    assert rows.source.tolist() == [[1, 2, 6, 7, 8], [-1, 1, 2, 9, 9], [-1, -1, 1, 2, 3]]


def test_tokens_left_by_an_earlier_request_are_never_copied():
    params = [SamplingParams()]
    rows = make_rows(params, 100, [[1, 2, 1, 2, 1, 2, 1, 2]])
    admit(rows, 0, [1, 2, 3], params[0], 0, 100)
    [(_, found)] = copy_by_lookup(rows, make_plan(params, 4), 8)
    assert found.tolist() == [False]


# The draft's own temperature.


@pytest.mark.parametrize("draft_temperature", [0, 0.5, 1.7, None])
def test_q_is_the_softmax_of_the_drafts_scores_at_its_own_temperature(llama: Pair, draft_temperature: float | None):
    """Beside a neighbour whose draft has none; float32 rounding of a softmax allows 1e-5."""
    [prompt, other] = random_prompts(64, [12, 9], seed=3)
    params = SamplingParams(
        temperature=0.8, draft_temperature=draft_temperature, seed=2, max_new_tokens=40, ignore_eos=True
    )
    neighbour = SamplingParams(temperature=1.3, draft_temperature=0.3, seed=3, max_new_tokens=60, ignore_eos=True)
    with Decoder.open(llama.bundle) as decoder:
        outputs = decoder.generate([prompt, other], [params, neighbour], draft_length=1, trace=True)
        [first], *rest = kept_tokens(outputs[0])  # it came with the prompt, without a proposal
        context, expected, rounds = [*prompt, first], [], outputs[0].trace[1:]
        for traced, kept in zip(rounds, rest, strict=True):
            scores = feed(decoder.draft, 0, context, 0)
            if draft_temperature == 0:
                assert traced.proposal == (int(scores.argmax()),)
                expected.append(1.0)
            else:
                expected.append(float((scores / (draft_temperature or 0.8)).softmax(-1)[traced.proposal[0]]))
            context += kept
    assert len(expected) > 15
    assert [traced.q[0] for traced in rounds] == pytest.approx(expected, abs=1e-5)


def kept_tokens(output):
    """Of each round."""
    for traced in output.trace:
        yield [*traced.proposal[: traced.accepted], *([] if traced.next_token is None else [traced.next_token])]


@pytest.mark.parametrize("draft_temperature", [None, 0, 2.0])
def test_a_greedy_request_knows_no_temperature_of_the_draft(llama: Pair, draft_temperature: float | None):
    """Neither its own nor a neighbour's: the same text, proposals and q."""
    [prompt, other] = random_prompts(64, [12, 9], seed=3)
    params = SamplingParams(max_new_tokens=30, draft_temperature=draft_temperature)
    neighbour = SamplingParams(max_new_tokens=60, ignore_eos=True, temperature=1.0, draft_temperature=0, seed=1)
    with Decoder.open(llama.bundle) as decoder:
        alone = decoder.generate(prompt, SamplingParams(max_new_tokens=30), trace=True)[0]
        beside = decoder.generate([prompt, other], [params, neighbour], trace=True)[0]
    assert [traced.proposal for traced in beside.trace] == [traced.proposal for traced in alone.trace]
    for found, expected in zip(beside.trace, alone.trace, strict=True):
        assert found.q == pytest.approx(expected.q, abs=1e-5), "batch shapes round differently"
