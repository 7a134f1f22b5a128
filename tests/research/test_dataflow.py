"""The picture of how data flows is the one that its script draws, and is legible in light and dark."""

from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from trt_spec.tools.pages.charts import COLOURS
from trt_spec.tools.pages.page import DARK
from trt_spec.tools.research import dataflow

pytestmark = pytest.mark.research

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"
WIDEST = {"title": 10.5, "code": 8.0, "small": 8.0}  # pixels a character takes on average in the widest usual font


def spans() -> list[tuple[float, float, int, str]]:
    """Left, right, baseline and words of each label."""
    found = []
    for one in ElementTree.fromstring(dataflow.draw()).iter(f"{SVG}text"):
        kind, words = one.attrib["class"].split(), str(one.text)
        width = len(words) * next(WIDEST[name] for name in kind if name in WIDEST)
        left = float(one.attrib["x"]) - width * (0.5 if "middle" in kind else 1 if "end" in kind else 0)
        found.append((left, left + width, int(one.attrib["y"]), words))
    return found


def test_the_picture_in_the_readme_is_what_the_script_draws():
    committed = ROOT / "tools" / "research" / "dataflow.svg"
    assert committed.read_text(encoding="utf-8") == dataflow.draw(), "run python -m trt_spec.tools.research.dataflow"
    assert f"]({committed.relative_to(ROOT)})" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_has_the_colours_of_the_pages_on_paper_of_its_own():
    light, dark = dataflow.draw().split("@media (prefers-color-scheme: dark)")
    for theme, style in ((COLOURS | dataflow.LIGHT_PAPER, light), (DARK | dataflow.DARK_PAPER, dark)):
        assert all(f".fill-{name} {{ fill: {value}; }}" in style for name, value in theme.items())
    first = next(ElementTree.fromstring(dataflow.draw()).iter(f"{SVG}rect"))
    assert first.attrib["class"] == "fill-paper"
    assert (first.attrib["width"], first.attrib["height"]) == (str(dataflow.WIDTH), str(dataflow.HEIGHT))


def test_no_label_touches_another_or_the_edge():
    labels = spans()
    for left, right, baseline, words in labels:
        assert left >= 0, words
        assert right <= dataflow.WIDTH, words
        assert 15 <= baseline <= dataflow.HEIGHT - 5, words
    for (left, right, baseline, words), (others_left, others_right, others_baseline, others) in combinations(labels, 2):
        apart = right < others_left or others_right < left
        assert apart or abs(baseline - others_baseline) >= 15, (words, others)


def test_no_label_of_a_round_leaves_its_box():
    boxes = [one for one in ElementTree.fromstring(dataflow.draw()).iter(f"{SVG}rect") if one.get("width") == "148"]
    inside = {words: (left, right) for left, right, _, words in spans()}
    for box, (_, lines) in zip(boxes, dataflow.ROUND, strict=True):
        for line in lines:
            left, right = inside[line]
            assert float(box.attrib["x"]) < left, line
            assert right < float(box.attrib["x"]) + 148, line
