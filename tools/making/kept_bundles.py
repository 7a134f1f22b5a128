"""Bundles that are exported on first use, kept in the user's cache, and made again if damaged."""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from ...engines import Bundle, BundleError, EngineError, ExportError
from ...engines.cache_folder import cache_folder
from ..extras import install_command, installed, requirements

PAIR = Path(__file__).parents[1] / "demo_pair"
TARGET = PAIR / "pycode-14m"
DEMO_DRAFTS = {  # by the drafter that runs them
    "model": PAIR / "pycode-1m",
    **{head: PAIR / f"pycode-14m-{head}" for head in ("eagle3", "medusa", "blockwise", "pass")},
}
LARGE = 2**24  # bytes of a file that is known by its size and time, since to read all of it takes long

Progress = Callable[[str], None]


def demo_bundle(progress: Progress, drafter: str = "model") -> Bundle:
    refuse_unshipped(drafter)
    return kept("demo", TARGET, [DEMO_DRAFTS[drafter]], progress)


def refuse_unshipped(drafter: str) -> None:
    """Refuse a head of the demo's target that only a clone has."""
    if drafter in DEMO_DRAFTS and not DEMO_DRAFTS[drafter].exists():
        here = " or ".join(name for name, folder in DEMO_DRAFTS.items() if folder.exists())
        raise EngineError(
            f"--drafter {drafter} needs {DEMO_DRAFTS[drafter].name}, which is in a clone of the repository and in no "
            f"wheel; run this in a clone, or say --drafter {here}"
        )


def bundle_of(
    target: str,
    drafts: Sequence[str],
    progress: Progress,
    max_length: int | None = None,
    weights: str = "none",
    shards: int = 1,
) -> Bundle:
    """Return the bundle of a checkpoint and its drafts, exported once.

    A model of the Hub is known by its name, so that a newer revision there makes no new bundle.
    """
    return kept(_name_of(target), target, drafts, progress, max_length, weights, shards)


def kept(
    name: str,
    target: str | Path,
    drafts: Sequence[str | Path],
    progress: Progress,
    max_length: int | None = None,
    weights: str = "none",
    shards: int = 1,
) -> Bundle:
    path = _place(name, [target, *drafts], max_length, weights, shards)
    if path.exists():
        try:
            return Bundle.open(path)
        except BundleError as error:
            progress(f"making the bundle again: {error}")
            shutil.rmtree(path, ignore_errors=True)
    else:
        progress(f"making the bundle {path}, once")
    missing = [name for name in requirements()["export"] if installed(name) is None]
    if missing:
        raise EngineError(
            f"a bundle is made on first use, which lacks {', '.join(missing)}; {install_command('export')}"
        )
    from ...export.passes.quantise import Quantisation
    from ...export.pipeline import export_bundle

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BundleError(
            f"cache folder {path.parent} cannot be made ({error.strerror}); set XDG_CACHE_HOME to another"
        ) from error
    stored = Quantisation(weights)
    try:
        export_bundle(
            target,
            path,
            list(drafts),
            max_length,
            weights=stored,
            draft_weights=stored,
            progress=progress,
            shards=shards,
        )
    except ExportError as error:
        if isinstance(error.__cause__, OSError):  # which says to choose another --out
            raise BundleError(
                f"cache folder {path.parent} cannot be written in ({error.__cause__.strerror}); set XDG_CACHE_HOME to "
                "another"
            ) from error
        raise
    return Bundle.open(path)


def refuse_unfound(target: str, drafts: Sequence[str], max_length: int | None, weights: str, shards: int = 1) -> None:
    """Refuse checkpoints that are not there before anything heavy is loaded, unless their bundle has been made."""
    if not _place(_name_of(target), [target, *drafts], max_length, weights, shards).exists():
        from ...export.checkpoints.finding import require_pair_found

        require_pair_found(target, drafts, max_length)


def _name_of(target: str) -> str:
    return re.sub(r"[^\w.-]+", "-", Path(target).name if Path(target).exists() else target)


def _place(name: str, checkpoints: Sequence[str | Path], max_length: int | None, weights: str, shards: int = 1) -> Path:
    return cache_folder() / f"{name}-{_key(checkpoints, max_length, weights, shards)}"


def _key(checkpoints: Sequence[str | Path], *options: object) -> str:
    """A hash of the checkpoints, the options and the exporter, so that an old bundle is never used."""
    digest = hashlib.sha256(f"{version('trt-spec')} {options}".encode())
    for file in sorted((Path(__file__).parents[2] / "export").rglob("*.py")):
        digest.update(file.name.encode() + file.read_bytes())
    for checkpoint in checkpoints:
        for part in _identity(checkpoint):
            digest.update(part)
    return digest.hexdigest()[:16]


def _identity(checkpoint: str | Path) -> Iterator[bytes]:
    """Return what tells a checkpoint from others: its files, or its name on the Hub."""
    place = Path(checkpoint)
    if not place.exists():
        yield str(checkpoint).encode()
        return
    for file in sorted(place.rglob("*")) if place.is_dir() else [place]:
        if file.is_file():
            about = file.stat()
            yield f"{file.name} {about.st_size}".encode()
            yield file.read_bytes() if about.st_size < LARGE else str(about.st_mtime_ns).encode()
