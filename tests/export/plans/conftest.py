"""How plans are compiled in tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from trt_spec.export.plans import build, compiler
from trt_spec.export.plans.compiler import Compiler


@pytest.fixture
def compiled_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are compiled in this process: for each build one of its own would have to load the libraries."""

    @contextmanager
    def compiler_here(engine: str) -> Iterator[build.Compile]:
        yield partial(compiler._answer, Compiler(engine))

    monkeypatch.setattr(build, "_compiler", compiler_here)
