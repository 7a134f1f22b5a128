"""Long tests are listed, and a listed one is of the exhaustive tier; each file keeps a test in the default tier."""

from pathlib import Path

import pytest

from . import long_proofs
from .long_proofs import MOST_SECONDS, LongProofs

LONGER = MOST_SECONDS + 1
TESTS = """
import time

def test_quick(): ...

def test_long():
    end = time.process_time() + 0.05
    while time.process_time() < end: ...
"""


def test_what_takes_longer_than_a_test_of_the_default_tier_may_is_listed() -> None:
    assert long_proofs.long_proofs({"a::1": LONGER, "a::2": 0.1, "b::1": 0.1}) == ["a::1"]


def test_what_any_change_may_break_is_never_listed() -> None:
    assert long_proofs.long_proofs({"tests/test_layering.py::1": LONGER, "tests/test_layering.py::2": 0.1}) == []
    assert not any(name.startswith(long_proofs.OF_EVERY_CHANGE) for name in long_proofs.TABLE.read_text().splitlines())


def test_a_file_of_long_tests_alone_keeps_the_quickest_of_them() -> None:
    assert long_proofs.long_proofs({"a::1": LONGER + 1, "a::2": LONGER, "b::1": LONGER}) == ["a::1"]


def test_a_file_that_was_not_measured_stays_as_it_was_and_what_is_gone_leaves_the_table() -> None:
    assert long_proofs.long_proofs({"a::1": 0.1, "a::2": LONGER}, ["a::1", "a::3", "b::1"]) == ["a::2", "b::1"]


class Running:
    """A plugin that brings the table's along, and keeps what has run."""

    pytest_addoption = staticmethod(long_proofs.add_option)

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_configure(self, config: pytest.Config) -> None:
        config.pluginmanager.register(LongProofs(config))

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.names.append(nodeid)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = exhaustive\naddopts = -m 'not exhaustive'\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    monkeypatch.setattr(long_proofs, "TABLE", tmp_path / "long_proofs.txt")
    monkeypatch.setattr(long_proofs, "MOST_SECONDS", 0.04)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    long_proofs.TABLE.write_text("")
    return long_proofs.TABLE


def run(folder: Path, *options: str) -> list[str]:
    ran = Running()
    how = ["-q", "--import-mode=importlib", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    assert pytest.main([str(folder), *how, *options], plugins=[ran]) == 0
    return ran.names


def test_measuring_writes_the_table_by_which_a_long_test_leaves_the_default_tier(table: Path) -> None:
    both = ["test_it.py::test_quick", "test_it.py::test_long"]
    assert run(table.parent, "--measure") == both
    assert table.read_text() == "test_it.py::test_long\n"
    assert run(table.parent) == ["test_it.py::test_quick"]
    assert run(table.parent, "-m", "exhaustive") == ["test_it.py::test_long"]
    assert run(table.parent, "--measure") == both, "listed tests are measured, too"
