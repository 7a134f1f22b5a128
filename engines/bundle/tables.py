"""Arrays of a model that a round reads beside its graph, in one file without pickles."""

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from ..errors import BundleError
from .bundle import Bundle
from .layout import TABLES


def write_tables(folder: Path, tables: Mapping[str, np.ndarray]) -> None:
    """Write the arrays of a model into its folder."""
    np.savez(folder / TABLES, **tables)  # type: ignore[arg-type]  # numpy's names may be anything


def read_tables(bundle: Bundle, model: str, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Read these arrays of a model."""
    file = bundle.path / model / TABLES
    try:
        with np.load(file, allow_pickle=False) as stored:
            return {name: stored[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise BundleError(
            f"{file} does not hold the tables of the {model} head ({error}); export the bundle again"
        ) from error
