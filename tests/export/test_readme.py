"""The folder's README lists the files that are there and names tests that exist."""

import re
from pathlib import Path

from trt_spec.export.families.table import BEHIND_SOURCES, WORKS

ROOT = Path(__file__).resolve().parents[2]
EXPORT = ROOT / "export"
TEXT = (EXPORT / "README.md").read_text(encoding="utf-8")
MAP = TEXT[TEXT.index("## The files") : TEXT.index("## Families")]


def test_the_map_names_every_file_and_every_pass_and_nothing_else() -> None:
    names = set(re.findall(r"`([\w./]+)`", MAP)) - {"export_bundle"}
    files = [file for file in EXPORT.rglob("*") if file.is_file() and file.suffix in (".py", ".txt")]
    expected = {"special/", "passes/"}
    for file in (file.relative_to(EXPORT) for file in files if file.name != "__init__.py"):
        folder = file.parent.name
        if folder == "passes":
            expected.add(file.stem)
        elif folder != "special":
            expected.add(str(file))
    assert names == expected


def test_every_claim_names_tests_that_exist() -> None:
    named = re.findall(r"`([\w./]+\.py)::(\w+)`", TEXT)
    assert len(named) > 30
    for file, test in named:
        path = ROOT / file if file.startswith("tests/") else ROOT / "tests" / "export" / file
        assert f"\ndef {test}(" in path.read_text(encoding="utf-8"), f"{file}::{test}"


def test_the_number_of_families_is_the_tables() -> None:
    assert f"{len(WORKS)} of transformers' language models work, {len(BEHIND_SOURCES)} of them behind" in TEXT
