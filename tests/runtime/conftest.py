"""Rounds of every folder can be recorded where there is no GPU."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from trt_spec.engines.onnxruntime import OnnxRuntimeEngine
from trt_spec.runtime.scheduling import capture

from ..kit.recorder import Recorder


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    """Rounds of ONNX Runtime as if they could be captured, with a cache that stays where it is."""
    recorder, open_ = Recorder(), OnnxRuntimeEngine.__init__

    def opened(self: OnnxRuntimeEngine, *arguments: Any) -> None:
        open_(self, *arguments)
        self.static_capacity = True

    with (
        patch.object(capture, "Record", recorder),
        patch.object(capture, "new_pool", lambda: "pool"),
        patch.object(OnnxRuntimeEngine, "capturable", lambda self: True),
        patch.object(OnnxRuntimeEngine, "__init__", opened),
    ):
        yield recorder
