"""Add files to a bundle after its export; the manifest lists and hashes them like all others."""

import hashlib
from dataclasses import replace

from ..errors import BundleError
from .bundle import Bundle
from .layout import MANIFEST
from .whole_files import remove_leftovers, write_whole


def put_file(bundle: Bundle, folder: str, suffix: str, content: bytes) -> Bundle:
    """Make this the only file of a folder. At every moment the bundle is whole, with the older file or with this one.

    A file is named after its content. It is written before the manifest lists it, and removed once no manifest does.
    """
    digest = hashlib.sha256(content).hexdigest()
    name = f"{folder}/{digest[:12]}{suffix}"
    older = [file for file in bundle.files if file.startswith(f"{folder}/") and file != name]
    kept = {file: entry for file, entry in bundle.files.items() if file not in older}
    added = replace(bundle, files=kept | {name: {"bytes": len(content), "sha256": digest}})
    try:
        (bundle.path / folder).mkdir(exist_ok=True)
        remove_leftovers(bundle.path / folder)
        write_whole(bundle.path / name, content)
        write_whole(bundle.path / MANIFEST, added.manifest().encode())
    except OSError as error:
        raise BundleError(
            f"bundle {bundle.path} cannot take {name} ({error.strerror}); it is unchanged, make room and try again"
        ) from error
    for file in older:
        (bundle.path / file).unlink(missing_ok=True)
    return added
