"""Keeps what torch's compiler makes of a graph in the user's cache, so that the next process need not compile.

Torch loads it as it loads its own cache: by pickle, and as libraries of the system. So it comes from a
file that nobody else can write, never from a bundle. Each process unpacks it into a folder of its own.
"""

import io
import os
import platform
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import torch

from ..bundle.whole_files import write_whole
from ..cache_folder import cache_folder

PLACES = {"TORCHINDUCTOR_CACHE_DIR": ".", "TRITON_CACHE_DIR": "triton"}  # where torch looks for code, in a folder
LOCKS = "locks"
ROOT = 0
OTHERS_MAY_WRITE = 0o022
DIGEST_BYTES = sha256().digest_size
TURN = threading.RLock()  # the places are those of all threads


class KeptCode:
    """The compiled code of one graph, for this version of torch and this processor."""

    def __init__(self, graph: Path) -> None:
        self.file = cache_folder() / "compiled" / _name(graph)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._known: set[str] = set()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have torch find the code, and put what it compiles beside it."""
        from torch._inductor.utils import clear_caches

        with TURN:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="trt-spec-", ignore_cleanup_errors=True)
                self._known = self._unpack()
            before = {name: os.environ.get(name) for name in PLACES}
            os.environ |= {name: str(Path(self._folder.name, place)) for name, place in PLACES.items()}
            clear_caches()  # else torch takes what it has loaded for another graph, and it is not kept for this one
            try:
                yield
            finally:
                clear_caches()
                for name, value in before.items():
                    os.environ.pop(name, None)
                    if value is not None:
                        os.environ[name] = value

    def keep(self) -> None:
        """Write the file anew if something was compiled; where that is impossible, nothing is kept."""
        if self._folder is None or self._files().keys() == self._known:
            return
        self._unpack()  # what other processes have kept since
        files = self._files()
        self._known = set(files)
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, path in files.items():
                archive.write(path, name)
        content = packed.getvalue()
        with suppress(OSError):
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_safe(self.file.parent):
                write_whole(self.file, sha256(content).digest() + content)

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = None

    def _files(self) -> dict[str, Path]:
        assert self._folder is not None
        folder = Path(self._folder.name)
        files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
        return {name.as_posix(): path for name, path in sorted(files.items()) if name.parts[0] != LOCKS}

    def _unpack(self) -> set[str]:
        """Put the files that are kept and not there yet into the folder, and return their names."""
        assert self._folder is not None
        content = _read(self.file)
        if content is None:
            return set()
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            for name in names:
                if not Path(self._folder.name, name).exists():  # a library that is loaded must not be written again
                    archive.extract(name, self._folder.name)
        return set(names)


def _name(graph: Path) -> str:
    """Name the code by all that it depends on and torch does not look at."""
    found = sha256(graph.read_bytes())
    found.update(f"{torch.__version__} {platform.machine()} {_processor()}".encode())
    return found.hexdigest()[:32]


def _processor() -> str:
    """Return what tells processors apart for which the C++ compiler makes different code."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return platform.processor()


def _read(file: Path) -> bytes | None:
    """Return what was kept if it is whole, and nobody else can have written it."""
    with suppress(OSError):
        if _is_safe(file.parent) and _is_safe(file):
            found = file.read_bytes()
            if found[:DIGEST_BYTES] == sha256(content := found[DIGEST_BYTES:]).digest():
                return content
    return None


def _is_safe(path: Path) -> bool:
    """Say whether only this user and the system's can write there."""
    if not hasattr(os, "getuid"):
        return True  # as torch's own cache on Windows
    found = path.stat()
    return found.st_uid in (os.getuid(), ROOT) and not found.st_mode & OTHERS_MAY_WRITE
