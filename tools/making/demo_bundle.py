"""The bundle of the shipped pair. It is exported on first use, kept in the user's cache, and made again if damaged."""

import hashlib
import os
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from ...engines import Bundle, BundleError, EngineError
from ..extras import install_command, installed, requirements

PAIR = Path(__file__).parents[1] / "demo_pair"
TARGET, DRAFT = PAIR / "pycode-14m", PAIR / "pycode-1m"


def demo_bundle(progress: Callable[[str], None]) -> Bundle:
    path = _cache_folder() / f"demo-{_key()}"
    if path.exists():
        try:
            return Bundle.open(path)
        except BundleError as error:
            progress(f"making the demo bundle again: {error}")
            shutil.rmtree(path, ignore_errors=True)
    else:
        progress(f"making the demo bundle {path}, once")
    _export(path, progress)
    return Bundle.open(path)


def _export(path: Path, progress: Callable[[str], None]) -> None:
    missing = [name for name in requirements()["export"] if installed(name) is None]
    if missing:
        raise EngineError(
            f"the demo makes its bundle on first use and lacks {', '.join(missing)}; {install_command('export')}"
        )
    from ...export.pipeline import export_bundle

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(
            f"cache folder {path.parent} cannot be made ({error.strerror}); set XDG_CACHE_HOME to another"
        ) from error
    export_bundle(TARGET, path, draft=DRAFT, progress=progress)


def _cache_folder() -> Path:
    """The XDG specification says to ignore a relative path."""
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "trt-spec"


def _key() -> str:
    """A hash of the shipped pair and the exporter, so that an old bundle is never used."""
    digest = hashlib.sha256(version("trt-spec").encode())
    sources = (Path(__file__).parents[2] / "export").rglob("*.py")
    for file in sorted([*sources, *(path for path in PAIR.rglob("*") if path.is_file())]):
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]
