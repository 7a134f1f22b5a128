"""`pytest --share I/N --since COMMIT`: of the exhaustive tests a share, and those of the rooms that changed."""

import re
from pathlib import Path
from subprocess import run
from zlib import crc32

import pytest

ROOM = re.compile(r"trt_spec\.(\w+\.\w+)")  # as an import names it


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", metavar="I/N", help="of the exhaustive tests run one of N shares; 7/3 is the same as 1/3"
    )
    parser.addoption(
        "--since", metavar="COMMIT", help="beside this share, run the exhaustive tests of rooms that changed since then"
    )


def keep_one_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the exhaustive tests of other shares, but for those of rooms that changed.

    Tests of one file are of one share, so that what they have in common is made once. Where more than one share of the
    tests is of rooms that changed, these have their turn too: the next share of them is kept.
    """
    if not (share := config.getoption("share")):
        return
    number, shares = map(int, share.split("/"))
    exhaustive = [item for item in items if item.get_closest_marker("exhaustive")]
    turn = {item: crc32(item.path.relative_to(config.rootpath).as_posix().encode()) % shares for item in exhaustive}
    changed = rooms_changed_since(config.getoption("since"), config.rootpath)
    touched = [item for item in exhaustive if changed & rooms_of(item.path, config.rootpath)]
    if len(touched) * shares > len(exhaustive):
        touched = [item for item in touched if turn[item] == (number + 1) % shares]
    kept = {item for item in exhaustive if turn[item] == number % shares} | set(touched)
    others = set(exhaustive) - kept
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


def rooms_changed_since(commit: str | None, root: Path) -> set[str]:
    """Return the rooms whose code or tests differ from a commit's, as they stand or as they were committed."""
    if commit is None:
        return set()
    command = ["git", "diff", "--name-only", "--relative", commit]
    found = run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    rooms = {place(Path(line)) for line in found.splitlines()}
    return rooms | {room.split(".")[0] for room in rooms}


def rooms_of(test: Path, root: Path) -> set[str]:
    """Return the room beside which a test lies, or the folder of rooms, and those that it imports from by name."""
    own = test.relative_to(root)
    of_a_folder = own.parts[0] == "tests" and len(own.parts) == 3  # tests/runtime/test_greedy.py
    return {own.parts[1] if of_a_folder else place(own), *ROOM.findall(test.read_text(encoding="utf-8"))}


def place(file: Path) -> str:
    """`runtime.drafters` of `runtime/drafters/lookup.py` and of its tests, `export.pipeline` of one file's tests."""
    parts = file.parts[1:] if file.parts[0] == "tests" else file.parts
    return ".".join(part.removeprefix("test_").removesuffix(".py") for part in parts[:2])
