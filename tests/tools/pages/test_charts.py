"""Charts show the numbers they are given, and nothing is measured for one that cannot be drawn."""

import json
import re
from html import unescape

import pytest
from trt_spec.tools.commands.plan import plan
from trt_spec.tools.pages import charts
from trt_spec.tools.pages.charts import COLOURS, inline_svg
from trt_spec.tools.pages.page import DARK
from trt_spec.tools.theory.lines import speed_up

from ..conftest import assert_refused

BUNDLE = "of a fixture"
PLAIN = {
    "draft_length": 0,
    "tokens_per_second": 100.0,
    "tokens_per_second_each": [90.0, 100.0, 104.0],
    "predicted": 1.0,
    "bandwidth_share": 0.4,
    "parts_ms": {"draft": 0.0, "verify": 9.0, "accept": 0.5, "host": 0.25},
}
DRAFTED = {
    "draft_length": 4,
    "tokens_per_second": 180.0,
    "tokens_per_second_each": [170.0, 180.0, 181.0],
    "predicted": 2.0,
    "bandwidth_share": 0.25,
    "acceptance": 0.6,
    "draft_ms": 2.0,
    "verify_ms": 9.5,
    "parts_ms": {"draft": 2.5, "verify": 10.0, "accept": 1.0, "host": 0.5},
    "speculation": {"histogram": [4, 3, 2, 1, 0], "acceptance_by_position": [0.6, 0.5, 0.25, 0.0, None]},
}
THEIRS = [{"draft_length": k, "tokens_per_second": 50.0 + k, "tokens_per_second_each": [50.0 + k]} for k in (0, 4)]


def lines(axes):
    return {line.get_label(): [list(map(float, data)) for data in line.get_data()] for line in axes.lines}


def test_the_main_chart_has_a_point_for_each_setting_and_the_prediction_as_a_line():
    result = {"settings": [PLAIN, DRAFTED], "compared": {"name": "transformers", "settings": THEIRS}}
    [axes] = charts.speed_over_draft_length(result).axes
    assert lines(axes) == {
        "measured": [[0, 4], [100, 180]],
        "predicted": [[0, 4], [100, 200]],
        "transformers": [[0, 4], [50, 54]],
    }
    ranges = [segment.tolist() for segment in axes.collections[0].get_segments()]
    assert ranges == [[[0, 90], [0, 104]], [[4, 170], [4, 181]]]
    alone = charts.speed_over_draft_length(result | {"compared": None})
    assert set(lines(alone.axes[0])) == {"measured", "predicted"}


def test_the_share_of_the_bandwidth_has_a_point_for_each_setting():
    [axes] = charts.bandwidth_over_draft_length({"settings": [PLAIN, DRAFTED]}).axes
    [[lengths, shares]] = lines(axes).values()
    assert (lengths, shares) == ([0, 4], [40, 25])


def test_the_histogram_has_a_bar_for_each_count_of_accepted_proposals():
    [axes] = charts.accepted_histogram(DRAFTED).axes
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([40, 30, 20, 10, 0])
    assert [text.get_text() for text in axes.texts] == ["40%", "30%", "20%", "10%", "0%"]


def test_the_bars_of_the_longest_proposals_have_no_labels_that_would_touch():
    long = DRAFTED | {"speculation": {"histogram": [1] * 17}}
    [axes] = charts.accepted_histogram(long).axes
    assert (len(axes.patches), len(axes.texts)) == (17, 0)


def test_a_position_that_no_round_examined_has_no_point():
    [axes] = charts.acceptance_by_position(DRAFTED).axes
    assert lines(axes)["accepted"] == [[1, 2, 3, 4], [0.6, 0.5, 0.25, 0.0]]
    assert set(lines(axes)["α = 0.60"][1]) == {0.6}


def test_the_parts_of_a_round_follow_one_another():
    [axes] = charts.round_timeline(PLAIN, DRAFTED).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["bare runs", "K = 4", "K = 0"]
    bars = [[(bar.get_x(), bar.get_width()) for bar in part] for part in axes.containers]  # draft, verify, accept, host
    assert [part[1] for part in bars] == [(0, 2.5), (2.5, 10), (12.5, 1), (13.5, 0.5)]
    assert [part[2] for part in bars] == [(0, 0), (0, 9), (9, 0.5), (9.5, 0.25)]
    assert [part[0] for part in bars] == [(0, 2), (2, 9.5), (11.5, 0), (11.5, 0)]


@pytest.mark.parametrize(
    ("alpha", "cost", "curves"),
    [
        (0.8, 0.05, [{"α = 0.9", "α = 0.8", "α = 0.7"}, {"c = 0.025", "c = 0.05", "c = 0.1"}]),
        (1.0, 0.0, [{"α = 1", "α = 0.9"}, {"c = 0", "c = 0.05", "c = 0.1"}]),
        (0.0, 0.5, [{"α = 0", "α = 0.1"}, {"c = 0.25", "c = 0.5", "c = 1"}]),
    ],
)
def test_the_planners_curves_are_the_tables_beside_their_neighbours(alpha, cost, curves):
    found = plan(alpha, cost, 1.0, cost, 8)
    figure = charts.planned_speed_up(found)
    assert [set(lines(axes)) - {"_child3", "_child2"} for axes in figure.axes] == curves
    table = [one["speed_up"] for one in found["settings"]]
    for axes, label in zip(figure.axes, (f"α = {alpha:.3g}", f"c = {cost:.3g}"), strict=True):
        assert lines(axes)[label] == [list(range(9)), table]
    above = lines(figure.axes[1])[f"c = {2 * cost:.3g}" if cost else "c = 0.1"][1]
    assert above == [speed_up(alpha, k, 2 * cost or 0.1) for k in range(9)]


def test_an_inline_chart_takes_every_colour_from_its_page_and_keeps_its_text():
    svg = inline_svg(charts.round_timeline(PLAIN, DRAFTED), "round", "A round")
    assert not re.findall(r"(?:fill|stroke): #\w+", svg)
    assert set(re.findall(r"var\(--(\w+)\)", svg)) <= set(COLOURS) == set(DARK)
    assert ">bare runs</text>" in svg
    assert svg.startswith('<svg role="img" aria-label="A round" ')


def test_two_charts_of_a_page_share_no_id_and_the_same_chart_is_the_same_text():
    first, again, other = (
        inline_svg(charts.accepted_histogram(DRAFTED), name, "x") for name in ("one", "one", "another")
    )
    assert first == again
    ids = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (first, other)]
    assert not ids[0] & ids[1]
    for svg, own in zip((first, other), ids, strict=True):
        assert set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg)) <= {(i, "") for i in own} | {
            ("", i) for i in own
        }


@pytest.mark.parametrize(
    "command",
    [
        ("bench", "--bundle", BUNDLE, "--report", "out.html"),
        ("bench", "--bundle", BUNDLE, "--plot", "out.png"),
        ("plan", "--alpha", ".8", "--plot", "out.svg"),
    ],
)
def test_without_matplotlib_the_error_names_the_extra_before_anything_is_done(
    run, llama, monkeypatch, tmp_path, command
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    message = "charts are drawn by matplotlib, which is not here; pip install 'trt-spec[report]'"
    assert_refused(run(*(llama.bundle if word == BUNDLE else word for word in command)), message)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", [("bench", "--bundle", BUNDLE), ("plan", "--alpha", ".8")])
def test_a_picture_of_another_format_is_refused(run, llama, command):
    words = [llama.bundle if word == BUNDLE else word for word in command]
    assert_refused(run(*words, "--plot", "out.gif"), "--plot out.gif ends in '.gif', expected .png or .svg")


def test_the_planner_draws_a_file_of_either_format(run, tmp_path):
    for name, begin in (("curves.png", b"\x89PNG\r\n"), ("curves.svg", b"<?xml")):
        assert run("plan", "--alpha", ".8", "--cost", ".05", "--plot", tmp_path / name).code == 0
        assert (tmp_path / name).read_bytes().startswith(begin)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "curves.svg"]


def words(picture):
    """All that an SVG says, line by line."""
    return [unescape(text) for text in re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())]


def test_a_picture_of_bench_says_which_pair_in_which_engine_on_which_machine(run, llama, tmp_path):
    (tmp_path / "prompts.txt").write_text("def main\n")
    few = ("--max-new-tokens", 16, "--repeats", 3, "--draft-lengths", 2, "--prompts", tmp_path / "prompts.txt")
    result = run("bench", "--bundle", llama.bundle, *few, "--plot", tmp_path / "plot.svg", "--json")
    found = json.loads(result.out)
    said = " ".join(words(tmp_path / "plot.svg"))
    assert f"{found['target']} with draft {found['draft']} onnxruntime on cpu (" in said
    assert found["conditions"]["machine"]["cpu"]["model"] in said
    assert "one prompt, 3 repeats, each a tick" in said
    assert "(K proposals, then one pass of the target over them)" in said


def test_every_repeat_has_a_tick_on_the_main_chart():
    [axes] = charts.speed_over_draft_length({"settings": [PLAIN, DRAFTED], "compared": None}).axes
    ticks = axes.collections[1].get_offsets().tolist()
    assert ticks == [[0, 90], [0, 100], [0, 104], [4, 170], [4, 180], [4, 181]]


def test_a_title_is_shown_as_it_is_and_no_line_of_it_is_wider_than_the_picture(tmp_path):
    title = ["a $name$ with half a character \ud800 " + "and many words more " * 10]
    with (tmp_path / "plot.svg").open("w") as out:
        charts.save(charts.accepted_histogram(DRAFTED), title, tmp_path / "plot.svg", out)
    lines = [line for line in words(tmp_path / "plot.svg") if "name" in line or "words" in line]
    assert lines[0].startswith("a $name$ with half a character ? and")
    assert " ".join(lines).count("words") == 10
    assert max(map(len, lines)) <= charts.TITLE_WIDTH


def test_a_picture_of_the_planner_says_what_was_calculated(run, tmp_path):
    run("plan", "--alpha", ".8", "--cost", ".05", "--plot", tmp_path / "plan.svg")
    said = " ".join(words(tmp_path / "plan.svg"))
    assert "Speculation as calculated: acceptance α = 0.8; in target steps, a draft step costs c = 0.05" in said
    assert said.count("one pass of the target over them") == 1, "an axis label for both panels"
