"""The request's transform is that of transformers (and of OpenAI's API for presence and frequency), in our order.

Probabilities are compared within 1e-6: both are softmaxes of float32 scores that differ by rounding only.
"""

from dataclasses import replace

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor
from trt_spec.runtime import SamplingParams
from trt_spec.runtime.acceptance.transform import transform
from trt_spec.runtime.state.proposal import ProposedTokens
from trt_spec.runtime.state.tree import Tree

from ...kit.exact import warpers_of
from ..states import make_plan, make_rows

VOCAB = 50
SETTINGS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.5, top_k=5),
    SamplingParams(temperature=1.0, top_k=1),
    SamplingParams(temperature=1.0, top_k=VOCAB + 9),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.0, top_p=1e-4),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=1.0, repetition_penalty=1.7),
    SamplingParams(temperature=1.0, repetition_penalty=0.6),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.2),
    SamplingParams(temperature=1.0),
]


def by_transformers(logits: torch.Tensor, params: SamplingParams, context: list[int]) -> torch.Tensor:
    """In the order of blueprint §6, which is also that of `generate`."""
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps += warpers_of(params)
    return steps(torch.tensor([context]), logits[None])[0].softmax(-1)


def counts_of(output: list[int], vocab: int = VOCAB) -> torch.Tensor:
    return torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=vocab).float()


def test_every_setting_equals_transformers_in_one_mixed_batch():
    """All settings at once, so that each row's filters must leave the other rows alone."""
    torch.manual_seed(0)
    prompt, output = [3, 4, 4, 9], [7, 3, 11]
    rows = make_rows(SETTINGS, VOCAB, [prompt] * len(SETTINGS))
    rows.columns["output_counts"][:] = counts_of(output)
    logits = torch.randn(len(SETTINGS), 3, VOCAB) * 4
    ahead = [13, 7]
    found = transform(logits, rows, make_plan(SETTINGS), ProposedTokens(torch.tensor([ahead] * len(SETTINGS)))).softmax(
        -1
    )
    for row, params in enumerate(SETTINGS):
        for position in range(3):
            expected = by_transformers(logits[row, position], params, [*prompt, *output, *ahead[:position]])
            torch.testing.assert_close(found[row, position], expected, atol=1e-6, rtol=0, msg=str(params))


@pytest.mark.parametrize("params", SETTINGS)
def test_every_setting_alone_equals_transformers(params: SamplingParams):
    torch.manual_seed(1)
    rows = make_rows([params], VOCAB, [[3, 4]])
    plan = make_plan([params])
    logits = torch.randn(1, 1, VOCAB) * 4
    found = transform(logits, rows, plan, ProposedTokens(torch.tensor([[5, 5]]))).softmax(-1)[0, 0]
    torch.testing.assert_close(found, by_transformers(logits[0, 0], params, [3, 4, 5, 5]), atol=1e-6, rtol=0)


def test_presence_and_frequency_count_the_output_only():
    """As OpenAI's API defines them: logit − count · frequency − (count > 0) · presence."""
    params = SamplingParams(temperature=1.0, presence_penalty=0.5, frequency_penalty=0.25)
    rows = make_rows([params], 6, [[0, 1, 1]])
    scores = transform(torch.zeros(1, 1, 6), rows, make_plan([params]), ProposedTokens(torch.tensor([[2, 2, 3]])))[0, 0]
    assert scores.tolist() == [0, 0, -1.0, -0.75, 0, 0]


def test_repetition_counts_prompt_and_output_and_divides_or_multiplies_by_sign():
    params = SamplingParams(temperature=1.0, repetition_penalty=2.0)
    rows = make_rows([params], 4, [[0, 1, 1]])
    scores = transform(
        torch.tensor([[[4.0, -4.0, 6.0, 8.0]]]), rows, make_plan([params]), ProposedTokens(torch.tensor([[2]]))
    )[0, 0]
    assert scores.tolist() == [2.0, -8.0, 3.0, 8.0]


def test_bias_comes_before_penalties_and_those_before_the_temperature():
    params = SamplingParams(temperature=0.5, repetition_penalty=2.0, presence_penalty=1.0, logit_bias={0: 3.0, 1: -3.0})
    rows = make_rows([params], 3, [[0]])
    scores = transform(
        torch.tensor([[[1.0, 1.0, 1.0]]]), rows, make_plan([params]), ProposedTokens(torch.tensor([[1]]))
    )[0, 0]
    assert scores.tolist() == [(1 + 3) / 2 / 0.5, ((1 - 3) * 2 - 1) / 0.5, 1 / 0.5]


def test_top_p_looks_at_what_top_k_left_and_at_the_temperature():
    """Of .4 .3 .2 .1, top-k 2 leaves .57 .43; top-p .5 then leaves one."""
    params = SamplingParams(temperature=1.0, top_k=2, top_p=0.5)
    scores = torch.tensor([[[0.4, 0.3, 0.2, 0.1]]]).log()
    kept = transform(scores, make_rows([params], 4), make_plan([params]), None).isfinite()
    assert kept.tolist() == [[[True, False, False, False]]]
    hot = replace(params, temperature=10.0, top_k=0)  # nearly uniform: half the mass takes two
    kept = transform(scores, make_rows([hot], 4), make_plan([hot]), None).isfinite()
    assert kept.tolist() == [[[True, True, False, False]]]


def test_a_token_of_bias_minus_infinity_is_never_drawn():
    settings = [
        SamplingParams(temperature=1.0, logit_bias={2: -float("inf")}, **filters)
        for filters in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.5})
    ]
    rows = make_rows(settings, 4, [[2]] * len(settings))
    logits = torch.tensor([0.0, 1.0, 9.0, -1.0]).expand(len(settings), 1, 4)
    nothing = ProposedTokens(torch.zeros(len(settings), 0, dtype=torch.int64))
    probabilities = transform(logits, rows, make_plan(settings), nothing).softmax(-1)
    assert probabilities.isfinite().all()
    assert (probabilities[..., 2] == 0).all()
    assert (probabilities[..., 1] > 0).all()


@pytest.mark.parametrize("filters", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.9}])
def test_tokens_tied_with_the_last_one_kept_stay(filters):
    params = SamplingParams(temperature=1.0, **filters)
    scores = torch.tensor([[[1.0, 2.0, 2.0, 2.0, 0.0]]])
    kept = transform(scores, make_rows([params], 5), make_plan([params]), None).isfinite()
    assert kept.tolist() == [[[False, True, True, True, False]]]


def test_a_greedy_row_keeps_its_best_token_whatever_its_filters_and_neighbours():
    torch.manual_seed(2)
    greedy = SamplingParams(top_k=3, top_p=0.2, min_p=0.5)
    settings = [greedy, SamplingParams(temperature=1.0, top_k=2, top_p=0.5, min_p=0.3)]
    rows = make_rows(settings, VOCAB)
    logits = torch.randn(2, 4, VOCAB)
    scores = transform(logits, rows, make_plan(settings), None)
    assert torch.equal(scores[0].argmax(-1), logits[0].argmax(-1))


def test_the_transform_does_not_change_the_logits_it_reads():
    """They are the engine's own output, from which the log-probabilities are read afterwards."""
    torch.manual_seed(3)
    settings = [*SETTINGS, SamplingParams(temperature=1.0, logit_bias={3: 1.0})]
    rows = make_rows(settings, VOCAB, [[1]] * len(settings))
    logits = torch.randn(len(settings), 1, VOCAB)
    before = logits.clone()
    transform(logits, rows, make_plan(settings), ProposedTokens(torch.zeros(len(settings), 0, dtype=torch.int64)))
    assert torch.equal(logits, before)


def test_each_verify_row_counts_the_proposals_before_it():
    """Pitfall 8."""
    params = [SamplingParams(temperature=1.0, presence_penalty=1.0)] * 2
    rows = make_rows(params, 5, [[0], [1]])
    before = rows.columns["output_counts"]
    before[0, 4] = 2
    proposed = torch.tensor([[3, 3, 1], [4, 0, 4]])
    counts = ProposedTokens(proposed).counts(before, 4)
    assert counts.tolist() == [
        [[0, 0, 0, 0, 2], [0, 0, 0, 1, 2], [0, 0, 0, 2, 2], [0, 1, 0, 2, 2]],
        [[0, 0, 0, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 1], [1, 0, 0, 0, 2]],
    ]
    assert before[0].tolist() == [0, 0, 0, 0, 2], "what was only proposed is not counted"
    for drafted in range(4):  # and so does each step of the draft
        alone = ProposedTokens(proposed[:, :drafted]).counts(before, 1)
        assert torch.equal(alone[:, 0], counts[:, drafted])


def test_each_node_of_a_tree_counts_its_own_path_alone():
    """As the end of a line does that says the same."""
    tree = Tree(1, 2, [True, True], 3, torch.device("cpu"))  # a row of two lines, then one with three siblings
    all_three, none = torch.ones(1, 3, dtype=torch.bool), torch.zeros(1, 3, dtype=torch.bool)
    places, ranks = torch.tensor([[0, 1, 1]]), torch.tensor([[1, 1, 2]])
    tokens = torch.tensor([[3, 1, 3, 4, 2]])
    paths = {"lines": [[1], [1, 2], [3], [3, 4]], "comb": [[1], [1, 2], [3], [1, 4], [1, 5]]}
    for kind, each in paths.items():
        tree.begin()
        if kind == "comb":
            tree.place(all_three, places, ranks, places, all_three)
        for number in range(2 if kind == "lines" else 1):
            tree.end_line(number, torch.tensor([2]))
        before = torch.tensor([[0.0, 2.0, 0.0, 1.0, 0.0]])
        counts = ProposedTokens(tokens, tree).counts(before, 6)
        assert torch.equal(counts[:, 0], before)
        for path in each:
            said = tokens[:, [node - 1 for node in path]]
            assert torch.equal(counts[:, path[-1]], ProposedTokens(said).counts(before, 1)[:, 0]), path
        ends = [path for path in each if not any(other[:-1] == path for other in each)]
        assert sorted(tree.paths(0)) == sorted(ends)
    tree.begin()
    tree.place(all_three, places, ranks, places, none)
    tree.end_line(0, torch.tensor([0]))
    assert tree.paths(0) == [[]], "nothing is proposed"
