"""One word is one thing: the glossary is short, and what it replaced is in no code, page or message."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RETIRED = {  # in identifiers too; each with the word that took its place
    "law": "distribution",
    "laws": "distributions",
    "swallow": "absorb",
    "swallows": "absorbs",
    "swallowed": "absorbed",
    "swallowing": "absorbing",
}
RIDDLES = {  # in the product and in pages; tests keep them for some names
    "behind": "after",
    "stood": "accepted",
    "told": "reported",
}
KEPT = "stood_beside"  # a field of the report of `tune`, which users may read
RETIRED_CLASSES = ("Ahead", "Asked", "Flight", "Source(Protocol)", "Told")  # a class `Source` is what an encoder reads
WORD = re.compile(rf"(?<![a-z])({'|'.join(RETIRED)})(?![a-z])", re.IGNORECASE)
RIDDLE = re.compile(rf"(?<!left[ _])(?<![a-z])(?!{KEPT})({'|'.join(RIDDLES)})(?![a-z])", re.IGNORECASE)
MOST_WORDS = 40


def found_in(text: str) -> list[str]:
    return WORD.findall(text) + [
        one for one in RETIRED_CLASSES if re.search(rf"^ *class {re.escape(one)}(?!\w)", text, re.M)
    ]


def files_of(*folders: str) -> list[Path]:
    files = [page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"]
    for folder in folders:
        files += [file for file in (ROOT / folder).rglob("*") if file.suffix in (".py", ".md")]
    return files


def test_no_file_has_a_retired_word() -> None:
    files = files_of("engines", "export", "runtime", "tests", "tools")
    files.remove(Path(__file__).resolve())
    assert len(files) > 500
    assert {str(file): words for file in files if (words := found_in(file.read_text(encoding="utf-8")))} == {}


def test_pages_and_the_product_have_no_riddle() -> None:
    files = [*files_of("engines", "export", "runtime", "tools"), *(ROOT / "tests").rglob("*.md")]
    assert len(files) > 500
    assert {str(file): words for file in files if (words := RIDDLE.findall(file.read_text(encoding="utf-8")))} == {}


@pytest.mark.parametrize(
    "text", ["Behind a source.", "behind = 1", "what stood", "is told of it", "text_behind", "stood_beside_it = told"]
)
def test_a_riddle_would_be_found(text: str) -> None:
    assert RIDDLE.search(text)


@pytest.mark.parametrize("text", ["what was left behind", "left_behind", "understood", KEPT])
def test_plain_words_are_none(text: str) -> None:
    assert not RIDDLE.search(text)


@pytest.mark.parametrize("text", ["Behind a law.", "have_laws = 1", "SWALLOWED", "class Flight(NamedTuple):"])
def test_a_retired_word_would_be_found(text: str) -> None:
    assert found_in(text)


@pytest.mark.parametrize("text", ["flawed", "lawful", "the Lawrence paper", "class FlightPlan"])
def test_a_part_of_another_word_is_none(text: str) -> None:
    assert not found_in(text)


def test_the_glossary_has_at_most_forty_words_in_no_row_twice() -> None:
    rows = re.findall(r"^\| (?!word )([^|]+) \|", (ROOT / "GLOSSARY.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert 30 < len(rows) == len(set(rows)) <= MOST_WORDS


def test_the_files_that_were_pairs_have_names_of_their_own() -> None:
    retired = ("acceptance/params", "acceptance/parameters", "grammars/compiling", "drafters/foreign")
    assert [name for name in retired if (ROOT / "runtime" / f"{name}.py").exists()] == []
