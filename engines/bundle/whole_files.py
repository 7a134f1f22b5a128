"""Writes a file beside its place and renames it at the end: readers find it whole, or as it was before.

A file that is being written is locked. The system lifts the lock when the process ends, however it ends. So the next
process that writes there can tell leftovers from files that are still being written.
"""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from .undisturbed import undisturbed

try:
    import fcntl
except ImportError:  # Windows has no such locks, so leftovers of killed processes stay
    fcntl = None  # type: ignore[assignment]

PARTIAL = "partial"


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file whole, or leave it as it was before."""
    with written_aside(path) as stream:
        stream.write(content)


@contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """Yield a stream whose content appears at `path` if the block succeeds; otherwise nothing changes."""
    remove_leftovers(path.parent, path.name)
    with claimed(path, PARTIAL) as (partial, stream):
        yield stream
        take_place(partial, stream, path)


@contextmanager
def claimed(path: Path, kind: str) -> Iterator[tuple[Path, BinaryIO]]:
    """Make a hidden file beside `path` that belongs to this process until the block ends and removes it."""
    made: list[tuple[Path, BinaryIO]] = []
    try:
        with undisturbed():
            made.append(_claim(path, kind))
        yield made[0]
    finally:
        with undisturbed():
            for file, stream in made:
                with suppress(OSError):  # on a full disk, closing fails to write the rest once more
                    stream.close()
                file.unlink(missing_ok=True)


def _claim(path: Path, kind: str) -> tuple[Path, BinaryIO]:
    while True:
        file = path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")
        stream = file.open("xb")
        _lock(stream, wait=True)
        if os.fstat(stream.fileno()).st_nlink:
            return file, stream
        stream.close()  # before it was locked, another process took it for a leftover and removed it


def take_place(partial: Path, stream: BinaryIO, path: Path) -> None:
    """Rename a claimed file to `path`, once all of it is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())
    if fcntl is None:
        stream.close()  # Windows does not rename an open file; elsewhere a closed one could be taken for a leftover
    partial.replace(path)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove the leftovers of killed processes that were writing files of this name, or any file of the folder."""
    for _ in abandoned(folder, PARTIAL, name):
        pass


def abandoned(folder: Path, kind: str, name: str | None = None) -> Iterator[Path]:
    """Yield each file of this kind that an ended process left behind; remove it after its turn."""
    pattern = re.compile(rf"\.{'.+' if name is None else re.escape(name)}\.{kind}-[0-9a-f]+")
    try:
        found = [folder / entry for entry in os.listdir(folder) if pattern.fullmatch(entry)]
    except OSError:  # no such folder: the next write there reports it
        found = []
    for file in found:
        with suppress(OSError), file.open("r+b") as stream:  # it is gone by now, or another user's
            if _lock(stream, wait=False):
                yield file
                file.unlink(missing_ok=True)


def _lock(stream: BinaryIO, wait: bool) -> bool:
    """Return whether the lock was granted; not every file system has locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
