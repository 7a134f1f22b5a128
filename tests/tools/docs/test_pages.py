"""What the pages for users say of models and flags is so."""

import argparse
import re
from importlib import import_module
from pathlib import Path

import pytest
from trt_spec.export.families.table import REFUSED, WORKS
from trt_spec.export.families.text_models import READS_MORE
from trt_spec.tools.cli import COMMANDS, described_by
from trt_spec.tools.commands import export_models
from trt_spec.tools.commands.families import _said
from trt_spec.tools.commands.plan import plan
from trt_spec.tools.program import Parser
from trt_spec.tools.settings import CONFIG

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "tools" / "docs"
PAGES = [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "tools" / "README.md", ROOT / "tools" / "serving" / "README.md"]
THEIRS = {  # flags of other programs that the pages name
    *("--task", "--weight-format", "--model"),  # optimum-cli
    *("--discovery-backend", "--router-mode", "--migration-limit"),  # dynamo.frontend
    *("--index-url", "--no-deps", "--schema"),  # pip, llm
    *("--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--no-python"),  # torchrun
}
PROGRAMS = (
    "research.grow_pair",
    "research.train_draft",
    "research.train_pair",
    "research.auto_report",
    "research.figures",
    "measuring.gpu_report",
    "measuring.load",
)


def rows(page: str) -> list[list[str]]:
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [cells for cells in found if not set(cells[0]) <= set("- ")]


HEADINGS = {"works": "Works", "works: its text model": "Its text model works", "refused": "Refused"}


def test_the_models_that_people_know_do_what_the_exporter_does():
    kinds = []
    for said, heading in HEADINGS.items():
        table = (DOCS / "models.md").read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
        for name, kind in re.findall(r"^\| (.*) \| `([\w-]+)` \|$", table, re.MULTILINE)[1:]:
            assert kind in (*WORKS, *READS_MORE, *REFUSED), (name, kind)
            assert said == ("refused" if kind in REFUSED else _said(kind, None)), (name, kind)
            kinds.append(kind)
    assert len(kinds) > 50
    assert len(set(kinds)) == len(kinds), "each type has one row"


def flags() -> set[str]:
    """All flags of all programs."""
    found: set[str] = {f"--{CONFIG}"}
    for command in COMMANDS:
        parser = Parser()
        described_by(command).add_arguments(parser)
        found |= set(parser._option_string_actions)
    found |= set(export_models._parser()._option_string_actions)
    for module in PROGRAMS:
        parser = argparse.ArgumentParser()
        import_module(f"trt_spec.tools.{module}").add_arguments(parser)
        found |= set(parser._option_string_actions)
    parser = import_module("trt_spec.tools.dynamo.worker").parser()
    return found | set(parser._option_string_actions)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_flags_that_a_page_names_are_there(page: Path):
    text = page.read_text(encoding="utf-8")
    if page.name == "coming_from.md":
        text = "\n".join(re.sub(r"\(.*?\)", "", line).rpartition(" | ")[2] for line in text.splitlines())
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text))
    assert named - flags() - THEIRS == set()


def test_where_a_flag_is_called_the_same_it_is():
    """The first column of a row that says so has flags of ours."""
    same = [theirs for theirs, ours, *_ in rows("coming_from.md") if ours == "the same" and "--" in theirs]
    named = {flag for cell in same for flag in re.findall(r"--[a-z][a-z-]+", cell)}
    assert len(named) > 10
    assert named <= flags()


def test_the_table_of_what_a_draft_buys_is_calculated():
    table = [cells for cells in rows("drafts.md") if re.fullmatch(r"0\.\d", cells[0])]
    assert [float(alpha) for alpha, *_ in table] == [0.5, 0.6, 0.7, 0.8, 0.9]
    for alpha, *cells in table:
        for cost, cell in zip((0.03, 0.1, 0.2), cells, strict=True):
            found = plan(float(alpha), cost, 1.0, 0.0, 16)
            speed_up, length = re.fullmatch(r"([\d.]+) \((?:K = )?(\d+)\)", cell).groups()
            assert (float(speed_up), int(length)) == (round(found["best_speed_up"], 2), found["best_draft_length"])
