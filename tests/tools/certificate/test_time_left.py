"""The time left follows from what is done and what checks usually take."""

import pytest
from trt_spec.tools.certificate.effort import FULL, QUICK
from trt_spec.tools.certificate.time_left import TimeLeft


def test_the_rest_is_expected_to_go_as_fast_as_what_is_done():
    left = TimeLeft({"a": 1.0, "b": 3.0})
    left.reach("a", 1.0)
    assert left.share == 0.25
    assert left.seconds(10.0) == pytest.approx(30.0)
    left.reach("b", 0.5)
    assert left.share == pytest.approx(0.625)
    assert left.seconds(50.0) == pytest.approx(30.0), "b goes slower than was thought"
    left.reach("b", 1.0)
    assert left.seconds(80.0) == 0


def test_nothing_is_said_before_anything_is_done():
    left = TimeLeft({"a": 1.0})
    assert left.seconds(5.0) is None
    left.reach("a", 0.01)
    assert left.seconds(5.0) is None


def test_what_was_reached_is_not_taken_back():
    left = TimeLeft({"a": 1.0, "b": 1.0})
    left.reach("a", 2.0)
    assert left.share == 0.5, "a check that takes more than was thought is done at most"
    left.reach("a", 0.3)
    assert left.share == 0.5


def test_a_smaller_total_variation_is_more_work_of_the_distribution_alone():
    finer = FULL.catching(FULL.total_variation / 2)
    assert finer.total_variation == FULL.total_variation / 2
    assert finer.work == {**FULL.work, "distribution": 4 * FULL.work["distribution"]}
    assert FULL.work.keys() == QUICK.work.keys()
