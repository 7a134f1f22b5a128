"""A bundle is built aside and renamed into place: whatever happens, the old one or the new one is there, whole."""

import json
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..engines import ExportError
from ..engines.bundle import MANIFEST


@contextmanager
def built_aside(out: Path) -> Iterator[Path]:
    """An empty directory beside `out`; it takes the place of `out` if the block succeeds, else it goes."""
    out = out.resolve()
    refuse_foreign(out)
    partial = out.with_name(f".{out.name}.partial-{secrets.token_hex(4)}")
    try:
        partial.mkdir()
    except OSError as error:
        raise ExportError(f"cannot write in {out.parent} ({error.strerror}); choose another --out") from error
    try:
        yield partial
        _take_place(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def refuse_foreign(out: Path) -> None:
    """Only a bundle or an empty directory may be replaced."""
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


def _take_place(partial: Path, out: Path) -> None:
    old = out.with_name(f".{out.name}.old-{secrets.token_hex(4)}")
    if not out.exists():
        partial.rename(out)
        return
    try:
        out.rename(old)
        partial.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)
