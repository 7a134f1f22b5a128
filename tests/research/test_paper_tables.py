"""What is calculated of the paper's tables is what the paper prints, and its own tables agree with one another."""

import json

import pytest
from trt_spec.tools.research.paper_report import main, paper_report
from trt_spec.tools.research.paper_tables import ALPHAS, COSTS, LENIENT, LONGEST, RUNS, paper
from trt_spec.tools.theory.lines import speed_up

from ..kit.check_values import CHECK_VALUES

pytestmark = pytest.mark.research


@pytest.fixture(scope="module")
def found():
    return paper()


def test_table_1_is_the_check_values_and_what_the_paper_prints(found):
    rows = [
        (one["alpha"], one["draft_length"], one["paper_speed"], one["paper_operations"]) for one in found["table_1"]
    ]
    assert rows == CHECK_VALUES
    for one in found["table_1"]:
        assert one["speed"] == pytest.approx(one["paper_speed"], abs=0.005)
        assert one["operations"] == pytest.approx(one["paper_operations"], abs=0.005)


def test_table_4_follows_from_its_own_acceptance_and_costs_as_far_as_they_are_printed(found):
    """α and c are printed with two digits, which moves a speed by up to so much, and speeds with one."""
    for one in found["tables_2_and_4"]:
        alpha, k, c = one["alpha"], one["draft_length"], one["c"]
        most, least = speed_up(alpha + 0.005, k, c - 0.005), speed_up(alpha - 0.005, k, c + 0.005)
        assert least - 0.05 < one["paper_expected"] < most + 0.05


def test_tables_2_3_and_5_have_the_same_acceptance_where_they_speak_of_the_same():
    alphas = {(target, draft): (greedy, sampled) for target, draft, greedy, sampled in ALPHAS}
    for task, draft, temperature, _, alpha, *_ in RUNS:
        assert alphas[f"T5-XXL, {task}", draft][temperature] == alpha
    for target, draft, strict, *_ in LENIENT:
        assert alphas[target, draft][1] == strict


def test_a_bigram_that_costs_nothing_gains_a_quarter_as_the_paper_says(found):
    [row] = [one for one in found["table_3"] if (one["target"], one["draft"]) == ("T5-XXL, EnDe", "bigram")]
    assert row["speed"] == pytest.approx(1.25, abs=0.005)


def test_the_figures_are_those_of_the_closed_forms(found):
    for tokens, best, operations in zip(found["figures_2_and_4"], found["figure_3"], found["figure_4"], strict=True):
        a = tokens["alpha"]
        for k in (1, 2, 3, 5, 7, 10):
            expected = (1 - a ** (k + 1)) / (1 - a)
            assert tokens[str(k)] == pytest.approx(expected)
            assert operations[str(k)] == pytest.approx((k + 1) / expected)
        for c in COSTS:
            speeds = [(1 - a ** (k + 1)) / ((1 - a) * (c * k + 1)) for k in range(LONGEST)]
            assert best[f"{c:g}"] == speeds.index(max(speeds))


def test_what_the_paper_says_of_lenience_is_more_than_follows_from_it(found):
    for one in found["table_5_speed"]:
        assert one["best_speed"] < one["paper_speed"] < 1.1 * one["best_speed"]


def test_what_was_measured_here_stands_beside_it_and_follows_from_what_was_measured_with_it(found):
    ours = found["ours"]
    assert [(one["temperature"], one["draft_length"]) for one in ours["tables_2_and_4"]] == [
        (temperature, k) for temperature in (0, 1) for k in (3, 5, 7)
    ]
    for one in ours["tables_2_and_4"]:
        assert one["speed"] == pytest.approx(speed_up(one["alpha"], one["draft_length"], one["c"]), abs=5e-3)
    assert {one["draft"] for one in ours["table_3"]} >= {"unigram", "bigram"}
    for table in ("tables_2_and_4", "table_3"):
        assert all(0 < one.get("alpha", one.get("alpha_1")) < 1 for one in ours[table])
    for one in ours["table_5"]:
        rising = [one[f"lenience_{lenience}"] for lenience in ("1", "0.5", "0.3", "0.1")]
        assert rising == sorted(rising)
    said = paper_report(found)
    for one in (*found["table_3"], *ours["table_3"]):
        assert f"{one['target']}" in said
    assert f"{ours['tables_2_and_4'][0]['measured']:.2f}" in said


def test_the_tables_are_printed_and_given_as_json(capsys):
    assert main([]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["0.8", "5", "3.69", "3.69", "1.63", "1.63"] in rows
    assert ["EnDe", "T5-small", "0", "7", "0.75", "0.02", "3.16", "3.2", "3.4", "9", "3.20"] in rows
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == paper()
