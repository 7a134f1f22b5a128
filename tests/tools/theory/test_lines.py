import math

import pytest
from trt_spec.tools.theory.lines import (
    best_draft_length,
    lenient_acceptance,
    operations_growth,
    oracle_tokens_per_round,
    speed_up,
    tokens_per_round,
)

from ...kit.check_values import CHECK_VALUES


@pytest.mark.parametrize(("alpha", "k", "faster", "operations"), CHECK_VALUES)
def test_the_published_check_values_hold(alpha, k, faster, operations):
    assert speed_up(alpha, k, c=0) == pytest.approx(faster, abs=0.005)
    assert operations_growth(alpha, k, c=0) == pytest.approx(operations, abs=0.005)


def test_even_a_poor_draft_pays_if_it_is_free():
    assert speed_up(0.2, 3, c=0) == pytest.approx(1.25, abs=0.005)


def test_alpha_counts_examined_proposals_not_proposed_ones():
    assert tokens_per_round(0.8, 4) == pytest.approx(3.4, abs=0.05)
    proposed = (tokens_per_round(0.8, 4) - 1) / 4
    assert proposed == pytest.approx(0.59, abs=0.005)
    assert tokens_per_round(proposed, 4) == pytest.approx(2.3, abs=0.05)


@pytest.mark.parametrize("k", range(17))
def test_full_acceptance_gives_every_proposal_and_one_more(k):
    assert tokens_per_round(1.0, k) == k + 1


def test_the_sum_is_the_closed_form():
    for alpha in (0.0, 0.3, 0.99):
        for k in (0, 1, 7):
            assert tokens_per_round(alpha, k) == pytest.approx((1 - alpha ** (k + 1)) / (1 - alpha))


def test_no_proposals_are_plain_decoding():
    assert speed_up(0.9, 0, c=0.5) == 1


def test_some_draft_length_helps_iff_alpha_exceeds_the_cost_of_a_draft_step():
    for alpha in (0.1, 0.5, 0.9):
        for c in (0.05, 0.45, 0.55, 0.95):
            best = best_draft_length(alpha, c, longest=16)
            assert (best > 0) == (alpha > c)
            if best:
                assert speed_up(alpha, best, c) >= (1 + alpha) / (1 + c)


def test_a_costly_verify_pass_divides_the_gain():
    assert speed_up(0.8, 4, c=0.1, v=1.6) == pytest.approx(tokens_per_round(0.8, 4) / 2.0)


def test_an_oracle_for_the_draft_length_bounds_tokens_per_round():
    assert oracle_tokens_per_round(0.8) == pytest.approx(5)
    assert tokens_per_round(0.8, 16) < oracle_tokens_per_round(0.8) < 1.03 * tokens_per_round(0.8, 16)
    assert oracle_tokens_per_round(1) == math.inf


def test_lenience_accepts_more_and_all_in_the_end():
    p, q = (0.5, 0.3, 0.2), (0.1, 0.2, 0.7)
    assert lenient_acceptance(p, q, 1) == pytest.approx(0.1 + 0.2 + 0.2)
    assert lenient_acceptance(p, q, 0.5) == pytest.approx(0.1 + 0.2 + 0.4)
    assert lenient_acceptance(p, q, 0.1) == pytest.approx(1)


def test_a_costly_verify_pass_may_leave_no_draft_length_that_pays():
    assert best_draft_length(0.5, 0.1, 16, v=1.0) > 0
    assert best_draft_length(0.5, 0.1, 16, v=2.0) == 0
