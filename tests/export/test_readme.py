"""The folder's README has the rooms that are there, on the floors on which they stand, and the table's numbers."""

import re
from pathlib import Path

from trt_spec.export.families.table import WITH_SOURCES, WORKS

EXPORT = Path(__file__).resolve().parents[2] / "export"
TEXT = (EXPORT / "README.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (\d) \| `([\w./]+)` \| .* \| `([\w.]+)` \|$", re.MULTILINE)


def test_the_map_has_every_room_and_a_file_to_start_with() -> None:
    rows = ROW.findall(TEXT)
    rooms = {f"{entry.name}/" for entry in EXPORT.iterdir() if (entry / "__init__.py").is_file()}
    files = {file.name for file in EXPORT.glob("*.py") if file.name != "__init__.py"}
    assert {room for _, room, _ in rows} == rooms | files
    for _, room, first in rows:
        assert (EXPORT / room / first if room.endswith("/") else EXPORT / first).is_file()


def test_every_file_and_pass_that_the_page_names_exists() -> None:
    files = {str(file.relative_to(EXPORT)) for file in EXPORT.rglob("*.py")}
    names = {Path(file).name for file in files}
    for named in re.findall(r"`([\w./]+\.py)`", TEXT):
        if not named.startswith("tests/"):
            assert named in files or named in names, named
    passes = re.search(r"Of the passes, (.*?)returns how often", TEXT, re.DOTALL)
    assert passes is not None
    for named in re.findall(r"`(\w+)`", passes[1]):
        assert (EXPORT / "passes" / f"{named}.py").is_file(), named


def test_the_number_of_families_is_the_tables() -> None:
    assert f"{len(WORKS)} of transformers' language models work, {len(WITH_SOURCES)} of them with an encoder" in TEXT
