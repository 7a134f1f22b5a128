"""The pages name what is there: every test, file and module, and the engines as their table has them."""

import re
from pathlib import Path
from textwrap import indent

import pytest
from trt_spec.engines import ENGINES

from .tools.serving.clients.versions import VERSIONS

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("tools", "tools/docs", "tools/research", "tools/serving", "tools/serving/deploy")
FOLDERS = ("engines", "runtime", "tests", *TOOLS)
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))]
ROW = re.compile(r"^\| `([\w-]+)` \| (.*) \| ((?:cpu|cuda)[\w, ]*) \|$", re.MULTILINE)


@pytest.mark.parametrize("file", PAGES, ids=lambda file: str(file.relative_to(ROOT)))
def test_every_test_link_and_module_that_is_named_exists(file: Path):
    text = file.read_text(encoding="utf-8")
    named = [ROOT / path for path in re.findall(r"`(tests/[\w/]+\.py)`", text)]
    named += [file.parent / path for path in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", text)]
    for module in re.findall(r"trt_spec\.tools\.([a-z_.]+[a-z])", text):
        named.append(ROOT / "tools" / f"{module.replace('.', '/')}.py")
    for module in re.findall(r"`((?:measuring|making|research)\.\w+) ", text):
        named.append(ROOT / "tools" / f"{module.replace('.', '/')}.py")
    assert [str(path) for path in named if not path.exists()] == []


@pytest.mark.parametrize(
    ("page", "heading", "home", "least"),
    [
        ("tests/README.md", "| what | state | by |\n", "tests", 35),
        ("runtime/README.md", "| subject | what holds | shown by `tests/runtime/…` |\n", "tests/runtime", 15),
    ],
)
def test_a_table_of_claims_names_tests_that_exist(page: str, heading: str, home: str, least: int):
    """Further files of a row lie in the folder of its first one, or in the table's own."""
    table = (ROOT / page).read_text(encoding="utf-8").split(heading)[1].split("\n\n")[0]
    rows = table.splitlines()[1:]
    for row in rows:
        folder = ROOT / home
        for path in re.findall(r"`((?:\w+/)*(?:\w+\.py|\w+/))`", row.split(" | ")[-1]):
            found = next((base / path for base in (folder, ROOT / home) if (base / path).exists()), None)
            assert found is not None, f"{path} in {row}"
            folder = found if found.is_dir() else found.parent
    assert len(rows) > least


def test_the_round_that_a_page_quotes_is_the_code():
    page = (ROOT / "runtime/README.md").read_text(encoding="utf-8")
    quoted = page.split("from `round/plain.py`:\n\n```python\n")[1].split("```")[0]
    assert indent(quoted, "    ") in (ROOT / "runtime/round/plain.py").read_text(encoding="utf-8")


def test_the_table_of_engines_is_the_one_that_runs():
    found = ROW.findall((ROOT / "engines/README.md").read_text(encoding="utf-8"))
    assert found == [(kind.name, kind.runs, ", ".join(kind.devices)) for kind in ENGINES.values()]


def test_the_table_of_clients_has_the_versions_that_are_tried():
    rows = re.findall(
        r"^\| `?([^|`]+)`?( for \w+)? \| ([\d.]+) \| .* \| (default|clients) \|$",
        (ROOT / "tools/serving/README.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    found = {tier: {name + kind: version for name, kind, version, other in rows if other == tier} for *_, tier in rows}
    assert found["clients"] == VERSIONS
    pinned = dict(re.findall(r"^(\w+)==(.*)$", (ROOT / ".ci/constraints.txt").read_text(), re.MULTILINE))
    assert found["default"] == {f"{name} for Python": pinned[name] for name in ("openai", "anthropic")}


def test_no_command_of_the_readme_runs_out_of_the_page():
    for block in re.findall(
        r"<!-- \w+ -->\n```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    ):
        assert max(map(len, block.splitlines())) <= 100
