"""The report on auto compares runs that lie side by side, and says how sure it is."""

import json
import math
from dataclasses import replace
from statistics import fmean

import pytest
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.tools.research.auto_report import (
    CROWD,
    LENGTHS,
    SETS,
    compared,
    each_own,
    groups,
    interval,
    main,
    without_trees,
)

from ..kit.costs import BESIDE, known_costs, table

pytestmark = pytest.mark.research


def test_a_ratio_has_its_geometric_mean_and_an_interval_around_it():
    found = interval([2.0, 0.5, 1.0, 1.0])
    assert found["mean"] == pytest.approx(1)
    assert found["low"] == pytest.approx(1 / found["high"])
    error = math.log(found["high"]) / 3.18
    assert error == pytest.approx(math.log(2) * math.sqrt(2 / 3) / 2)
    many = interval([2.0, 0.5] * 6)
    assert math.log(many["high"]) == pytest.approx(1.96 * math.log(2) * math.sqrt(12 / 11 / 12))
    assert interval([1.25]) == {"mean": pytest.approx(1.25), "low": 0.0, "high": math.inf}


def test_settings_are_compared_run_by_run_and_the_best_by_the_mean():
    rows = [[4.0, 3.0, 2.0, 2.0], [4.0, 1.0, 4.0, 1.0]]
    found = compared(rows, [0, 2, 4])
    assert found["speed_ups"] == [1.0, 2.0, pytest.approx(4 / 3)]
    assert found["best_draft_length"] == 2
    assert found["auto_speed_up"] == pytest.approx(8 / 3)
    assert found["auto_against_plain"]["mean"] == pytest.approx(math.sqrt(2 * 4))
    assert found["auto_against_best"]["mean"] == pytest.approx(math.sqrt(1.5 * 1))
    assert "auto_against_lines" not in found
    found = compared([[*rows[0], 2.0], [*rows[1], 4.0]], [0, 2, 4])
    assert (found["auto_speed_up"], found["lines_speed_up"]) == (pytest.approx(8 / 3), pytest.approx(4 / 3))
    assert found["auto_against_lines"]["mean"] == pytest.approx(math.sqrt(1 * 4))


@pytest.mark.parametrize(
    ("bundle", "tokens", "said"),
    [
        ("none", "20", "bundle none is not a directory"),
        (None, "256", "outputs have up to 256 tokens, and the bundle allows 256 tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_a_sentence(llama, capsys, bundle, tokens, said):
    with known_costs():
        assert main(["--bundle", bundle or str(llama.bundle), "--new-tokens", tokens]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"auto_report: error: {said}")


def test_every_set_and_the_mixture_have_a_row(llama, capsys, tmp_path):
    with known_costs():
        arguments = ["--bundle", str(llama.bundle), "--repeats", "1", "--new-tokens", "20"]
        assert main([*arguments, "--json", str(tmp_path / "out.json")]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[0] for line in lines[1:-1]] == [*SETS, "mixture"]
        found = json.loads(lines[-1])
        assert found == json.loads((tmp_path / "out.json").read_text())
        assert "auto / lines" in lines[0]
        for one in (*found["sets"].values(), found["mixture"]):
            assert len(one["speed_ups"]) == len(LENGTHS)
            assert one["auto_against_plain"]["low"] < one["auto_against_plain"]["mean"]
            assert one["lines_speed_up"] > 0
        assert main([*arguments, "--drafter", "mixed", "--temperature", "1", "--rule", "coupled"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (found["draft_lengths"], found["temperature"], found["rule"]) == ([0], 1.0, "coupled")
        assert main([*arguments, "--batch", "2"]) == 0
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (found["batch"], set(found["sets"])) == (2, set(SETS))


def test_a_prompt_is_decoded_alone_or_in_a_crowd_of_which_some_wait():
    prompts = [[1], [2], [3]]
    assert groups(prompts, 1) == [[[1]], [[2]], [[3]]]
    [crowd] = groups(prompts, 2, begin=1)
    assert len(crowd) == CROWD * 2
    assert crowd[:4] == [[2], [3], [1], [2]]


def test_outputs_of_a_crowd_differ_in_length_and_seed_but_not_on_average():
    params = SamplingParams(max_new_tokens=64, seed=5)
    assert each_own(params, 1) == [params]
    crowd = each_own(params, 32)
    assert [one.seed for one in crowd] == list(range(32))
    lengths = [one.max_new_tokens for one in crowd]
    assert (min(lengths), len(set(lengths)) > 20) == (32, True)
    assert 90 < max(lengths) < 96
    assert fmean(lengths) == pytest.approx(64, rel=0.03)


def test_auto_of_lines_knows_the_same_costs_but_nothing_beside_a_line(llama):
    with (
        known_costs(known := table(beside=BESIDE)),
        Decoder.open(llama.bundle, max_batch=1) as decoder,
        without_trees(decoder, "cpu") as lines,
    ):
        assert lines.costs == replace(known, beside=(), beside_ms={}, beside_tokens={})
        assert without_trees(lines, "cpu") is None
    with Decoder.open(llama.bundle, max_batch=1) as untuned:
        assert without_trees(untuned, "cpu") is None
