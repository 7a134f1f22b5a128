"""Write a file beside its place and rename it into it: it is there whole, or as it was before.

A file that is being written is locked. The system lifts the lock when the process ends, however it ends: so the next
process that writes there can tell what was left behind from what is still being written.
"""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows has no such locks: there, what a killed process leaves stays
    fcntl = None  # type: ignore[assignment]

PARTIAL = "partial"


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file that is there whole, or as it was before."""
    with written_aside(path) as stream:
        stream.write(content)


@contextmanager
def written_aside(path: Path) -> Iterator[BinaryIO]:
    """Give a stream whose content appears under `path` when the block succeeds; else nothing changes."""
    remove_leftovers(path.parent, path.name)
    with claimed(path, PARTIAL) as (partial, stream):
        yield stream
        take_place(partial, stream, path)


@contextmanager
def claimed(path: Path, kind: str) -> Iterator[tuple[Path, BinaryIO]]:
    """Make a hidden file beside `path` that is this process's own until the block ends, and is removed then."""
    while True:
        file = path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")
        stream = file.open("xb")
        _lock(stream, wait=True)
        if os.fstat(stream.fileno()).st_nlink:
            break
        stream.close()  # before it was locked, another process took it for a leftover and removed it
    try:
        yield file, stream
    finally:
        with suppress(OSError):  # on a full disk, where what could not be written cannot be written now either
            stream.close()
        file.unlink(missing_ok=True)


def take_place(partial: Path, stream: BinaryIO, path: Path) -> None:
    """Rename a claimed file to `path`, once all of it is on the disk."""
    stream.flush()
    os.fsync(stream.fileno())
    if fcntl is None:
        stream.close()  # Windows does not rename an open file; elsewhere a closed one could be taken for a leftover
    partial.replace(path)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Remove what killed processes left of writing files of this name, or any files of the folder."""
    for _ in abandoned(folder, PARTIAL, name):
        pass


def abandoned(folder: Path, kind: str, name: str | None = None) -> Iterator[Path]:
    """Give each file of this kind whose process has ended without removing it; it is removed after its turn."""
    pattern = re.compile(rf"\.{'.+' if name is None else re.escape(name)}\.{kind}-[0-9a-f]+")
    try:
        found = [folder / entry for entry in os.listdir(folder) if pattern.fullmatch(entry)]
    except OSError:  # no such folder: whoever writes to it says so
        found = []
    for file in found:
        with suppress(OSError), file.open("r+b") as stream:  # gone meanwhile, or another user's
            if _lock(stream, wait=False):
                yield file
                file.unlink(missing_ok=True)


def _lock(stream: BinaryIO, wait: bool) -> bool:
    """Say whether the lock was given; not every file system has locks."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(stream, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
