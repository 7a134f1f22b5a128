"""A bundle's manifest: its format, its own hash, and the hash of every file that it vouches for."""

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import BundleError
from .layout import GRAPH, MANIFEST, WEIGHTS

FORMAT = 4


def read_manifest(path: Path) -> dict[str, Any]:
    """Read the fields of a manifest; refuse one that is missing, damaged or of another format."""
    if not path.is_dir():
        raise BundleError(f"bundle {path} is not a directory; make one with export-models --target … --out {path}")
    try:
        fields = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BundleError(f"{path} has no {MANIFEST}, so it is not a bundle; make one with export-models") from None
    except (OSError, ValueError, RecursionError) as error:
        raise BundleError(f"{path / MANIFEST} is not JSON ({error}); export the bundle again") from error
    if not isinstance(fields, dict) or not isinstance(fields.get("format"), int):
        raise BundleError(f"{path / MANIFEST} has no format number; export the bundle again with trt-spec")
    if fields["format"] != FORMAT:
        made = fields.get("made_by")
        version = made.get("trt-spec") if isinstance(made, dict) else None
        raise BundleError(
            f"bundle {path} has format {fields['format']} (made by trt-spec {version}), this version reads format "
            f"{FORMAT}; {'update trt-spec' if fields['format'] > FORMAT else 'export the bundle again'}"
        )
    if fields.get("sha256") != content_hash(fields):
        raise BundleError(
            f"{path / MANIFEST} is damaged: its sha256 is not that of its content; export the bundle again"
        )
    return fields


def content_hash(fields: dict[str, Any]) -> str:
    """Return the sha256 of all other fields of a manifest, however they are laid out."""
    content = {name: value for name, value in fields.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def graph_identity(path: Path, role: str, graph: str = GRAPH) -> str:
    """Return one hash of a model's weights and a graph, made from their hashes in the manifest of a verified bundle."""
    files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    hashes = [files[f"{role}/{name}"]["sha256"] for name in (graph, WEIGHTS)]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def measure(file: Path) -> dict[str, Any]:
    """Return the size and the hash of a file, as the manifest lists them."""
    with file.open("rb") as stream:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def refuse_escape(path: Path, name: str) -> None:
    """Refuse a listed file that lies outside the bundle."""
    parts = PurePosixPath(name)
    try:
        inside = (path / name).resolve().is_relative_to(path.resolve())
    except (ValueError, OSError, RuntimeError):  # a NUL, a name that no file system takes, a link to itself
        inside = False
    if parts.is_absolute() or ".." in parts.parts or not inside:
        raise BundleError(f"{path / MANIFEST} lists {name!r}, which lies outside the bundle; it is refused")


def require_whole(path: Path, name: str, size: int) -> None:
    """Refuse a file that is missing, or whose size is not the manifest's."""
    file = path / name
    if not file.is_file():
        raise BundleError(f"bundle {path} lacks {name}; export it again or copy it whole")
    found = file.stat().st_size
    if found != size:
        raise BundleError(f"{file} has {found} bytes, its manifest says {size}; export it again or copy it whole")


def require_unchanged(path: Path, name: str, sha256: str) -> None:
    """Refuse a file whose hash is not the manifest's."""
    file = path / name
    if measure(file)["sha256"] != sha256:
        raise BundleError(f"{file} is damaged: its sha256 is not the manifest's; export it again or copy it whole")
