"""A test that takes long is of the exhaustive tier: `long_proofs.txt` lists these, and `pytest --measure` writes it.

A file all of whose tests take long keeps the quickest of them in the default tier, and what any change may break stays.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

TABLE = Path(__file__).with_suffix(".txt")
MOST_SECONDS = 2.0  # of a core, that a test of the default tier takes
PROPERTY = "seconds of a core"
OF_EVERY_CHANGE = ("tests/test_layering.py", "tests/test_words.py", "tests/test_readmes.py")


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--measure", action="store_true", help=f"run listed tests, too, and write {TABLE.name} anew")


def long_proofs(taken: Mapping[str, float], listed: Iterable[str] = ()) -> list[str]:
    """Return which tests are long proofs, by the seconds that they have taken; files not measured stay as they are."""
    found = {name for name, each in taken.items() if each > MOST_SECONDS and not name.startswith(OF_EVERY_CHANGE)}
    of_file = defaultdict[str, list[str]](list)
    for name in taken:
        of_file[name.split("::")[0]].append(name)
    for names in of_file.values():
        if found.issuperset(names):
            found.remove(min(names, key=taken.__getitem__))
    return sorted(found | {name for name in listed if name.split("::")[0] not in of_file})


def seconds() -> float:
    """The time of a core that this process has taken, with that of the processes that it has started and ended."""
    taken = os.times()
    return taken.user + taken.system + taken.children_user + taken.children_system


class LongProofs:
    """A plugin of pytest that knows the table."""

    def __init__(self, config: pytest.Config) -> None:
        self._writes = config.getoption("measure")
        self._listed = frozenset(TABLE.read_text(encoding="utf-8").splitlines())
        self._taken: dict[str, float] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        if item.nodeid in self._listed and not self._writes:
            item.add_marker("exhaustive")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Note what a test takes, without what it shares with others."""
        began = seconds()
        try:
            return (yield)
        finally:
            item.user_properties.append((PROPERTY, seconds() - began))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._taken[report.nodeid.partition("@")[0]] = dict(report.user_properties)[PROPERTY]

    def pytest_sessionfinish(self) -> None:
        if self._writes and "PYTEST_XDIST_WORKER" not in os.environ:
            names = long_proofs(self._taken, self._listed)
            TABLE.write_text("".join(f"{name}\n" for name in names), encoding="utf-8")
