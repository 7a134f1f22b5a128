"""The tail of χ² is scipy's, and so many samples as are asked for do catch what they must."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2, ncx2
from trt_spec.engines import RequestError
from trt_spec.tools.certificate.chi_squared import samples_needed, statistic, tail, threshold, total_variation


@given(st.floats(0.1, 900), st.integers(1, 120))
def test_the_tail_is_scipys(value: float, freedom: int):
    assert tail(value, freedom) == pytest.approx(chi2.sf(value, freedom), rel=1e-6, abs=1e-290)


@given(st.floats(0.1, 900), st.integers(1, 120), st.floats(1e-3, 300))
def test_the_tail_of_the_noncentral_is_scipys(value: float, freedom: int, noncentrality: float):
    assert tail(value, freedom, noncentrality) == pytest.approx(ncx2.sf(value, freedom, noncentrality), abs=1e-7)


def test_the_threshold_is_exceeded_with_the_false_alarm_asked_for():
    for freedom, noncentrality in ((1, 0.0), (20, 0.0), (20, 5.0)):
        border = threshold(1e-7, freedom, noncentrality)
        assert tail(border, freedom, noncentrality) == pytest.approx(1e-7, rel=1e-6)


def test_so_many_samples_catch_the_stated_total_variation_with_the_stated_power():
    """The hardest fault of its size moves each cell in proportion to itself, half of them up, half down."""
    p = torch.full((20,), 0.05, dtype=torch.float64)
    shift = torch.tensor([0.05, -0.05] * 10, dtype=torch.float64) * 0.05 * 2
    generator = torch.Generator().manual_seed(0)
    samples = samples_needed(19, 0.05, 1e-6, 0.99)
    cells = dict(enumerate(p.tolist()))
    assert float(shift.abs().sum() / 2) == pytest.approx(0.05)
    caught = 0
    for _ in range(300):
        drawn = torch.multinomial(p + shift, samples, replacement=True, generator=generator)
        value, freedom = statistic(Counter(drawn.tolist()), cells)
        caught += tail(value, freedom) < 1e-6
    assert 290 <= caught <= 300
    fewer = samples_needed(19, 0.1, 1e-6, 0.99)
    assert samples / fewer == pytest.approx(4, rel=0.1)


def test_what_no_number_of_samples_catches_is_refused():
    """Shapes that differ by as much as the fault: more samples tell no more."""
    with pytest.raises(RequestError, match="takes more than 4,000,000 samples to catch"):
        samples_needed(10, 0.02, 1e-7, 0.99, divergence=4 * 0.02**2)


def test_rare_cells_count_together_and_the_impossible_is_infinitely_far_off():
    expected = {0: 0.99, 1: 0.004, 2: 0.004, 3: 0.002, 4: 0.0}
    value, freedom = statistic(Counter({0: 990, 1: 4, 2: 6}), expected)
    assert (value, freedom) == (pytest.approx(0.0), 1)
    assert tail(*statistic(Counter({0: 999, 4: 1}), expected)) == 0


def test_the_total_variation_is_half_of_all_differences():
    assert total_variation(Counter("aab"), {"a": 0.5, "b": 0.5}) == pytest.approx(1 / 6)
