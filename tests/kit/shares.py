"""`pytest --share I/N`: of the exhaustive tests one of N shares, and all that are of no such tier."""

from zlib import crc32

import pytest


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share", metavar="I/N", help="of the exhaustive tests run one of N shares; 7/3 is the same as 1/3"
    )


def keep_one_share(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the exhaustive tests of other shares.

    Tests of one file are of one share, so that what they have in common is made once.
    """
    if share := config.getoption("share"):
        number, shares = map(int, share.split("/"))
        others = {
            item
            for item in items
            if item.get_closest_marker("exhaustive")
            and crc32(item.path.relative_to(config.rootpath).as_posix().encode()) % shares != number % shares
        }
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
