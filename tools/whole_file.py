"""Write a command's output whole or not at all, and refuse a place that cannot take it before the work begins."""

import argparse
import errno
import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from ..engines import RequestError
from ..engines.bundle.whole_files import PARTIAL, claimed, written_aside

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """Give a stream whose text appears under `path` when the block succeeds; else nothing does."""
    with ExitStack() as stack:
        with _refused_if_unfit(path):
            # A text may quote the name of a file, and that may hold bytes that are not UTF-8.
            file = stack.enter_context(written_aside(path))
            text = io.TextIOWrapper(file, encoding="utf-8", errors="backslashreplace")
        try:
            yield text
            text.flush()
            stack.close()
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise RequestError(
                f"output {path} cannot be written ({error.strerror}); make room or choose another"
            ) from error


def refuse_unfit(*paths: Path | None) -> None:
    """Refuse places that cannot take a file, before anything heavy is loaded."""
    for path in paths:
        if path is not None:
            with _refused_if_unfit(path), claimed(path, PARTIAL):
                pass


@contextmanager
def _refused_if_unfit(path: Path) -> Iterator[None]:
    try:
        if path.is_dir():
            raise RequestError(f"output {path} is a directory, expected a file name")
        yield
    except OSError as error:
        raise RequestError(f"output {path} cannot be written ({error.strerror}); choose another") from error


@contextmanager
def outputs(arguments: argparse.Namespace, *flags: str) -> Iterator[dict[str, TextIO]]:
    """Give a stream for each of these flags that names a file."""
    with ExitStack() as stack:
        paths = {flag: path for flag in flags if (path := getattr(arguments, flag))}
        yield {flag: stack.enter_context(whole_file(path)) for flag, path in paths.items()}
