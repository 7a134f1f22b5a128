"""Shares of the exhaustive tests are apart, leave nothing out, and each has all other tests and what changed."""

import os
from pathlib import Path
from subprocess import run
from unittest.mock import patch

import pytest

from . import shares

FILES = 12
WHOLE = "tests/runtime/test_2.py"  # of all rooms of runtime
EXHAUSTIVE = "import pytest\n\n@pytest.mark.exhaustive\n@pytest.mark.parametrize('x', range(3))\ndef test(x): ...\n"
OTHERS = "".join(f"@pytest.mark.{tier}\ndef test_{tier}(): ...\n" for tier in ("wheel", "clients"))
MARKERS = "[pytest]\nmarkers = exhaustive\n    wheel\n    clients\n"


class Collecting:
    """A plugin of pytest that knows `--share` and keeps what is collected."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.left_out = 0

    pytest_addoption = staticmethod(shares.add_option)
    pytest_collection_modifyitems = staticmethod(shares.keep_one_share)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self.left_out += len(items)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.names = [item.nodeid for item in session.items]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text(MARKERS)
    (tmp_path / "test_others.py").write_text(f"import pytest\n\n{OTHERS}")
    for number in range(FILES):
        (tmp_path / f"test_{number}.py").write_text(EXHAUSTIVE)
    return tmp_path


def collected(folder: Path, *options: str) -> Collecting:
    found = Collecting()
    how = ["--collect-only", "-q", "--import-mode=importlib", "-p", "no:cacheprovider"]
    with patch.dict(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1"):  # those of others take seconds to load
        assert pytest.main([str(folder), "--rootdir", str(folder), *how, *options], plugins=[found]) == 0
    return found


def test_shares_are_apart_and_make_up_the_tier_and_each_has_the_wheel_and_the_clients(folder: Path) -> None:
    everything = set(collected(folder).names)
    others = {name for name in everything if "others" in name}
    assert (len(everything), len(others)) == (3 * FILES + 2, 2)
    each = [collected(folder, "--share", f"{number}/3") for number in range(3)]
    parts = [set(one.names) - others for one in each]
    assert all(others < set(one.names) for one in each)
    assert all(len(one.names) + one.left_out == len(everything) for one in each)
    assert sum(map(len, parts)) == 3 * FILES
    assert set().union(*parts) == everything - others
    assert max(map(len, parts)) < 3 * FILES, "more than one share has tests"


def test_tests_of_a_file_are_of_one_share_which_a_number_of_commits_chooses_too(folder: Path) -> None:
    one = collected(folder, "--share", "1/3").names
    assert one == collected(folder, "--share", "7/3").names
    files = [name.split("::")[0] for name in one if "others" not in name]
    assert all(files.count(file) == 3 for file in files)


@pytest.fixture
def committed(folder: Path) -> Path:
    """A repository in which tests import from a room, lie beside another, or beside a folder of rooms."""
    (folder / "test_0.py").write_text(EXHAUSTIVE + "\ndef other():\n    from trt_spec.runtime.memory import blocks\n")
    (folder / "tests" / "runtime" / "round").mkdir(parents=True)
    (folder / "test_1.py").rename(folder / "tests" / "runtime" / "round" / "test_1.py")
    (folder / "test_2.py").rename(folder / "tests" / "runtime" / "test_2.py")
    for room in ("memory", "round", "state"):
        (folder / "runtime" / room).mkdir(parents=True)
        (folder / "runtime" / room / "code.py").write_text("")
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        run(["git", *command], cwd=folder, check=True)
    return folder


@pytest.mark.parametrize(("room", "file"), [("memory", "test_0.py"), ("round", "tests/runtime/round/test_1.py")])
def test_tests_of_a_room_that_changed_are_of_every_share(committed: Path, room: str, file: str) -> None:
    (committed / "runtime" / room / "code.py").write_text("changed = True\n")
    for number in range(2):
        own = collected(committed, "--share", f"{number}/2").names
        both = collected(committed, "--share", f"{number}/2", "--since", "HEAD").names
        assert {name.split("::")[0] for name in set(both) - set(own)} <= {file, WHOLE}
        assert sum(name.startswith((file, WHOLE)) for name in both) == 6


def test_where_most_rooms_changed_a_second_share_is_run_and_no_more(committed: Path) -> None:
    for file in committed.glob("test_*.py"):
        file.write_text(file.read_text() + "\n")
    both = collected(committed, "--share", "1/3", "--since", "HEAD").names
    two = [set(collected(committed, "--share", f"{number}/3").names) for number in (1, 2)]
    assert set(both) == two[0] | {name for name in two[1] if not name.startswith("tests/")}
