"""The calculator's table is that of the theory page."""

import json

import pytest
from trt_spec.tools.theory.trees import best_tree, tokens_of_tree

from ...kit.check_values import CHECK_VALUES
from ..conftest import assert_refused


@pytest.mark.parametrize(("alpha", "k", "faster", "operations"), CHECK_VALUES)
def test_the_command_prints_the_check_values(run, alpha, k, faster, operations):
    result = run("plan", "--alpha", alpha, "--longest", "16")
    assert result.code == 0
    row = result.out.splitlines()[1 + k].split()
    assert [float(cell) for cell in row] == [k, pytest.approx(faster, abs=0.01), faster, operations]


def test_the_best_draft_length_is_the_tables(run):
    found = json.loads(run("plan", "--alpha", "0.8", "--cost", "0.05", "--json").out)
    best = max(found["settings"], key=lambda one: one["speed_up"])
    assert (found["best_draft_length"], found["best_speed_up"]) == (best["draft_length"], best["speed_up"])
    assert best["draft_length"] == 8
    assert found["oracle_tokens_per_round"] == pytest.approx(5)
    lines = run("plan", "--alpha", "0.8", "--cost", "0.05").out.splitlines()
    assert lines[-1] == "best K up to 16: 8, 3.09 × as fast as without a draft; at most 5.00 tokens a round, whatever K"


def test_a_draft_that_costs_more_than_it_gives_is_advised_against(run):
    assert "no K pays: decode without a draft" in run("plan", "--alpha", "0.2", "--cost", "0.3").out
    assert "no bound on tokens a round" in run("plan", "--alpha", "1").out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--alpha", "1.2"), "--alpha is 1.2, expected a share from 0 to 1"),
        (("--alpha", "nan"), "--alpha is nan, expected a share from 0 to 1"),
        (("--alpha", ".5", "--cost", "-1"), "--cost is -1.0, expected a number of target steps, at least 0"),
        (
            ("--alpha", ".5", "--verify-cost", "0.5"),
            "--verify-cost is 0.5, expected a number of target steps, at least 1",
        ),
        (("--alpha", ".5", "--operations", "inf"), "--operations is inf, expected a number of target steps"),
        (("--alpha", ".5", "--longest", "17"), "--longest is 17, expected 1 to 16"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(run, flags, said):
    assert_refused(run("plan", *flags), said)


def test_combs_and_trees_are_compared_with_lines_of_as_many_proposals(run):
    shares = ("--alpha", "0.6", "--siblings", ".2,.1", "--cost", "0.1", "--node-cost", "0.02", "--nodes", "20")
    found = json.loads(run("plan", *shares, "--json").out)
    rows = found["trees"]
    assert [one["proposals"] for one in rows] == list(range(1, 21))
    for one in rows:
        depth, nodes = map(int, one["tree"].split("/"))
        assert nodes == sum(map(int, one["comb"].split("+"))) == one["proposals"]
        tree = best_tree([0.6, 0.2, 0.1], nodes, depth)
        assert one["tree_tokens"] == pytest.approx(tokens_of_tree(tree, [0.6, 0.2, 0.1]))
        read = 1 + (depth - 1) * (1 + 0.02 * nodes)  # a draft step, and those that read the whole tree
        assert one["tree_speed_up"] == pytest.approx(one["tree_tokens"] / (0.1 * read + 1 + nodes * 0.02))
        assert max(one["comb_tokens"], one["tree_tokens"]) <= one["most_tokens"] + 1e-12
        assert ("line_tokens" in one) == (one["proposals"] <= 16)
        assert one.get("line_speed_up", 0) <= one["comb_speed_up"]
    assert rows[3]["comb"] == "2+2"
    assert rows[3]["comb_speed_up"] == pytest.approx((1 + 0.6 + 0.36 + 0.2 + 0.6 * 0.2) / (2 * 0.1 + 1 + 4 * 0.02))
    assert rows[0]["line_speed_up"] == rows[0]["comb_speed_up"] == pytest.approx(1.6 / 1.12)
    lines = run("plan", *shares).out.splitlines()
    best = max(rows, key=lambda one: one["comb_speed_up"])
    assert f"best comb: {best['comb']}, {best['comb_speed_up']:.2f} ×" in lines[-1]
    best = max(rows, key=lambda one: one["tree_speed_up"])
    assert f"best tree: {best['tree']}, {best['tree_speed_up']:.2f} ×" in lines[-1]
    assert rows[3]["tree"] == "2/4"
    assert rows[3]["tree_speed_up"] < rows[3]["comb_speed_up"], "the draft reads all of the tree for its second level"
    assert lines[-2].split()[:3] == ["20", "-", "-"]
    assert "trees" not in json.loads(run("plan", "--alpha", "0.6", "--json").out)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--siblings", ".3,.4"), "expected shares that do not rise and add up to at most 1"),
        (("--siblings", ".3,.2"), "expected shares that do not rise and add up to at most 1"),
        (("--siblings", ".2,-.1"), "expected shares that do not rise and add up to at most 1"),
        (("--siblings", "nan"), "expected shares that do not rise and add up to at most 1"),
        (("--siblings", "some"), "'some', expected shares like .15,.06"),
        (("--nodes", "20"), "--nodes is about combs and trees; say --siblings, too"),
        (("--node-cost", ".02"), "--node-cost is about combs and trees; say --siblings, too"),
        (("--siblings", ".1", "--nodes", "65"), "--nodes is 65, expected 1 to 64"),
        (("--siblings", ".1", "--node-cost", "-1"), "--node-cost is -1.0, expected a number of target steps"),
    ],
)
def test_siblings_that_make_no_sense_are_refused(run, flags, said):
    assert_refused(run("plan", "--alpha", "0.6", *flags), said)


def test_a_tree_is_as_deep_as_pays(run):
    """Where a draft step costs much, a bush is worth more than the tree of most tokens."""

    def best(cost: str) -> dict[str, object]:
        shares = ("--alpha", "0.6", "--siblings", ".2,.1", "--cost", cost, "--nodes", "12", "--json")
        return json.loads(run("plan", *shares).out)["trees"][-1]

    free, dear = best("0"), best("0.5")
    assert free["tree_tokens"] == pytest.approx(free["most_tokens"])
    assert dear["tree_tokens"] < dear["most_tokens"]
    assert int(dear["tree"].split("/")[0]) < int(free["tree"].split("/")[0])


def test_without_an_acceptance_there_is_nothing_to_plan(run):
    assert_refused(run("plan"), "the following arguments are required: --alpha")
