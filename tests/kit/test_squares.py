"""The square covers what it says."""

from collections import Counter
from itertools import combinations, product

from .squares import BATCHES, LENGTHS, in_a_square, in_pairs

DRAFTERS = ("model", "lookup")


def test_each_pair_of_factors_is_met_evenly():
    runs = list(in_a_square(50, DRAFTERS))
    met = [(run.batch, run.drafter, run.draft_length, prompt) for run in runs for prompt in run.prompts]
    assert len(met) == len(set(met)) == 50 * len(DRAFTERS) * len(BATCHES)
    three = Counter(each[:3] for each in met)
    assert set(three.values()) == {50 // len(LENGTHS)}
    assert len(three) == len(DRAFTERS) * len(BATCHES) * len(LENGTHS)
    assert set(Counter((batch, drafter, prompt) for batch, drafter, _, prompt in met).values()) == {1}
    assert set(Counter((length, prompt) for *_, length, prompt in met).values()) == {1}, "another each time"
    assert {len({length for *_, length, one in met if one == prompt}) for prompt in range(50)} == {4}


def test_in_pairs_each_value_meets_each_of_another_factor_in_few_cases() -> None:
    factors = {"a": (1, 2, 3), "b": ("x", "y", "z"), "c": (True, False), "d": (None, 0, 1, 2)}
    cases = in_pairs(**factors).args[1]
    for (i, some), (j, others) in combinations(enumerate(factors.values()), 2):
        assert {(case[i], case[j]) for case in cases} == {*product(some, others)}
    assert len(cases) < 20, "of 72"
