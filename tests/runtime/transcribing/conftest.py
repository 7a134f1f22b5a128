"""A tiny Whisper that knows several languages and one that knows English, each with a draft."""

from pathlib import Path

import pytest

from ...kit.bundles import export_pair
from ...kit.source_models import noisy_listener, tiny_listener


@pytest.fixture(scope="session")
def listeners(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("listeners")
    for name, several in (("several", True), ("english", False)):
        checkpoint = tiny_listener(folder / name, multilingual=several)
        export_pair(checkpoint, folder / f"{name}-bundle", noisy_listener(checkpoint, folder / "draft"))
    return folder
