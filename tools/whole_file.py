"""Write a file whole or not at all, and refuse a bad place before the work whose result it takes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from ..engines import RequestError


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A stream whose text appears under `path` if the block succeeds; otherwise nothing changes there."""
    try:
        if path.is_dir():
            raise RequestError(f"output {path} is a directory, expected a file name")
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        # A text may quote the name of a file, and that may hold bytes that are not UTF-8.
        stream = partial.open("x", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise RequestError(f"output {path} cannot be written ({error.strerror}); choose another") from error
    try:
        with stream:
            yield stream
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
