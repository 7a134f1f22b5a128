"""Build a bundle aside and rename it into place: the older bundle or the new one is there, whole.

The two change places at once, so that a bundle is there at every moment, where the system can do that; elsewhere the
older one is moved away first. A lock file beside them says that an export is under way. If one was killed, the next one
to the same place removes what is left; if it was killed after it had moved the older bundle away, that is moved back.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ...engines import ExportError
from ...engines.bundle import MANIFEST
from ...engines.bundle.undisturbed import undisturbed
from ...engines.bundle.whole_files import abandoned, claimed
from .exchange import exchanged

LOCK, PARTIAL, OLD = "lock", "partial", "old"


@contextmanager
def built_aside(out: Path) -> Iterator[Path]:
    """Give an empty directory that takes the place of `out` if the block succeeds, and else is removed."""
    out = _resolved(out)
    refuse_foreign(out)
    for lock in abandoned(out.parent, LOCK, out.name):
        _tidy(out, lock)
    with ExitStack() as stack:
        try:
            lock, _ = stack.enter_context(claimed(out, LOCK))
            stack.callback(_tidy, out, lock)
            partial = _beside(out, PARTIAL, lock)
            partial.mkdir()
        except OSError as error:
            raise ExportError(f"cannot write in {out.parent} ({error.strerror}); choose another --out") from error
        yield partial
        with undisturbed():
            if not exchanged(partial, out):
                if out.exists():
                    out.rename(_beside(out, OLD, lock))
                partial.rename(out)


@contextmanager
def disk_errors(out: str | Path) -> Iterator[None]:
    """Say in a sentence that a disk is full or read-only."""
    try:
        yield
    except OSError as error:
        raise ExportError(f"cannot write bundle {out}: {error.strerror or error}; nothing was left there") from error


def refuse_foreign(out: Path) -> None:
    """Only a bundle or an empty directory may be replaced."""
    if out.is_mount():
        raise ExportError(
            f"--out {out} is where a disk is mounted, which nothing can replace; choose a directory in it"
        )
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir():
        raise ExportError(f"--out {out} is a file, expected a new directory or a bundle to replace")
    try:
        fields = json.loads((out / MANIFEST).read_text(encoding="utf-8"))
        is_bundle = "trt-spec" in fields["made_by"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        is_bundle = False
    if not is_bundle:
        raise ExportError(f"--out {out} holds other things than a bundle; choose a new directory or empty this one")


def refuse_inside(out: Path, sources: Iterable[str | Path | None]) -> None:
    """Refuse to replace a directory that holds what is read."""
    for source in sources:
        if source is not None and Path(source).exists() and Path(source).resolve().is_relative_to(_resolved(out)):
            raise ExportError(f"--out {out} would be replaced, but {source} lies in it; choose another")


def _resolved(out: Path) -> Path:
    """Follow links, so that a link to a bundle stays one."""
    try:
        return out.resolve()
    except RuntimeError as error:
        raise ExportError(f"--out {out} is a link that leads to itself; choose another") from error


def _tidy(out: Path, lock: Path) -> None:
    """Remove what the export with this lock has left, but move a bundle back that nothing has replaced."""
    partial, old = _beside(out, PARTIAL, lock), _beside(out, OLD, lock)
    with undisturbed():
        if old.exists() and not out.exists():
            old.rename(out)
        for folder in (partial, old):
            shutil.rmtree(folder, ignore_errors=True)


def _beside(out: Path, kind: str, lock: Path) -> Path:
    """Name the folder of this kind that belongs to a lock: both end in the same number."""
    number = lock.name.rpartition("-")[2]
    return out.with_name(f".{out.name}.{kind}-{number}")
