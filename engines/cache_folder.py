"""The folder of this program in the user's cache."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """The XDG specification says to ignore a relative path."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "trt-spec"
