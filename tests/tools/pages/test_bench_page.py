"""The page of a bench run: all of its JSON, nothing else, and nothing that is fetched."""

import json
import re

import pytest
import torch
from trt_spec.tools.cli import main
from trt_spec.tools.pages.bench_page import main as render
from trt_spec.tools.pages.bench_page import report_page
from trt_spec.tools.pages.charts import COLOURS
from trt_spec.tools.pages.page import DARK, FRAME

from ...kit.costs import known_costs
from ..reading_pages import assert_self_contained


@pytest.fixture(scope="module")
def made(llama, tmp_path_factory):
    """The files of one run."""
    folder = tmp_path_factory.mktemp("report")
    prompts = folder / "prompts.txt"
    prompts.write_text("def main\nimport os\n")
    command = ["bench", "--bundle", str(llama.bundle), "--prompts", str(prompts), "--max-new-tokens", "24"]
    command += ["--repeats", "2", "--draft-lengths", "2,4"]
    for name, file in (("json", "out.json"), ("report", "out.html"), ("plot", "out.png")):
        command += [f"--{name}", str(folder / file)]
    threads = torch.get_num_threads()
    with known_costs():
        assert main([*command, "--all-drafters", "--lenience", "0.9"]) == 0
    torch.set_num_threads(threads)
    return folder


@pytest.fixture
def result(made):
    return json.loads((made / "out.json").read_text())


def test_the_page_is_self_contained_and_holds_the_numbers(made, result):
    page = assert_self_contained((made / "out.html").read_text())
    cells = page.find("td")
    for one in [*result["settings"], *result["drafters"]]:
        for value in (f"{one['tokens_per_second']:.1f}", f"{one['speed_up']:.2f}", f"{one['round_overhead']:.2f}"):
            assert value in cells
        for waits in (one["first_token_ms"], one["between_tokens_ms"]):
            assert {f"{ms:.1f}" for ms in waits.values()} <= set(cells)
    assert {"4, lookup", "4, suffix", "4, cascade", "auto, model"} <= set(cells)
    shown = " ".join(page.find("dd"))
    assert "lossy: with lenience 0.9" in shown
    for version in result["conditions"]["versions"].values():
        assert version in shown
    assert result["conditions"]["machine"]["cpu"]["model"] in shown
    assert "resident at the peak" in shown
    assert json.loads(page.find("pre")[0]) == result
    assert len(page.find("svg")) == 5
    assert (made / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_saved_result_gives_the_same_page(made, capsys):
    assert render([str(made / "out.json"), str(made / "again.html")]) == 0
    assert (made / "again.html").read_bytes() == (made / "out.html").read_bytes()
    (made / "other.json").write_text("{}")
    for source, said in (
        ("other.json", "is not a result of this version's bench (KeyError: 'settings')"),
        ("prompts.txt", "is not a result of this version's bench (JSONDecodeError: "),
        ("nothing.json", "cannot be read"),
    ):
        assert render([str(made / source), str(made / "no.html")]) == 2
        assert f"{source} {said}" in capsys.readouterr().err
        assert not (made / "no.html").exists()


def test_names_that_look_like_html_are_shown_as_they_are(result):
    evil = "<script>alert('&')</script>"
    result["target"] = result["bundle"] = result["conditions"]["machine"]["cpu"]["model"] = evil
    result["conditions"]["versions"][evil] = evil
    page = assert_self_contained(report_page(result))
    assert page.find("h1")[0].startswith(evil)
    assert any(text.startswith(evil) for text in page.find("dd"))


def test_another_runtime_and_its_ratio_are_on_the_page_when_it_was_measured(result):
    theirs = [
        {key: one[key] for key in one if key.startswith(("draft_length", "tokens_per_second", "first", "between"))}
        for one in result["settings"]
    ]
    for one in theirs:
        one["tokens_per_second"] /= 4
        one["differs_at"] = [None, 3 if one["draft_length"] else None]
    compared = {"name": "transformers", "runs_as": {"dtype": "float32"}, "settings": theirs}
    page = assert_self_contained(report_page(result | {"compared": compared}))
    assert "4.00 ×" in page.find("b")
    assert "2, transformers" in page.find("td")
    assert "dtype float32" in page.find("dd")
    assert any(text.startswith("K = 0: our text; K = 2: another text for 1 of 2 prompts") for text in page.find("dd"))


def test_plain_decoding_alone_and_a_draft_that_never_proposed_have_pages_too(result):
    alone = report_page(result | {"settings": result["settings"][:1]})
    assert len(assert_self_contained(alone).find("svg")) == 2
    for one in result["settings"][1:]:
        one["acceptance"] = None
    assert len(assert_self_contained(report_page(result)).find("svg")) == 3


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("theme", "index"), [(COLOURS, 0), (DARK, 1)], ids=["light", "dark"])
def test_text_and_lines_stand_out_from_the_page_in_both_themes(theme, index):
    """WCAG's 4.5 for text, 3 for what is drawn; the grid alone may be faint."""
    backgrounds = [re.findall(rf"--{name}: (#\w+)", FRAME.template)[index] for name in ("paper", "card")]
    for background in backgrounds:
        for name, colour in theme.items():
            least = {"ink": 4.5, "muted": 4.5, "line": 1}.get(name, 2.8 if name == "grey" else 3)
            assert contrast(colour, background) >= least, name
