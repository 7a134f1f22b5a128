"""NVIDIA Dynamo from the package index, in a folder of its own, and the engine that it runs."""

import subprocess
import sys
from pathlib import Path

import pytest
from trt_spec.runtime import Decoder
from trt_spec.tools.dynamo.worker import parser

from .cluster import ROOT


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dynamo beside the environment of the tests, whose versions of pydantic and certifi it does not allow."""
    home = tmp_path_factory.mktemp("dynamo")
    wanted = ["-r", ROOT / ".ci/dynamo.txt", "--no-deps", "--target", home]
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", *map(str, wanted)], check=True)
    return home


@pytest.fixture
def made(packages: Path, monkeypatch: pytest.MonkeyPatch):
    """`made(decoder, …)` makes the engine that Dynamo runs, in this process, and a context of Dynamo's own."""
    monkeypatch.syspath_prepend(str(packages))
    from dynamo._core import Context
    from trt_spec.tools.dynamo.engine import DynamoEngine

    def make(decoder: Decoder, *flags: str):
        return DynamoEngine(decoder, Path("card"), parser().parse_args(["--bundle", "b", *flags])), Context

    return make
