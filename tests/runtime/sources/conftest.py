"""A target behind an encoder, with a draft that shares it, one that has its own, and one that has none."""

from pathlib import Path

import pytest

from ...bundles import export_pair
from ...families import tiny_checkpoint
from ...source_models import noisy_copy, tiny_behind_source


def export_all(kind: str, folder: Path) -> Path:
    target = tiny_behind_source(kind, folder / "target")
    like = noisy_copy(kind, target, folder / "like", 0.05, encoder=False)
    other = noisy_copy(kind, target, folder / "other", 0.05, encoder=True)
    alone = tiny_checkpoint("llama", folder / "alone")
    return export_pair(target, folder / "bundle", [like, other, alone], max_length=128).bundle


@pytest.fixture(scope="session")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_all("t5", tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="session")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_all("whisper", tmp_path_factory.mktemp("whisper"))
