"""Tiny pairs as what is certified."""

from collections.abc import Callable
from typing import Any

import pytest
from trt_spec.engines import Bundle
from trt_spec.tools.certificate.subject import Subject

from ...kit.bundles import Pair


@pytest.fixture(scope="session")
def subject_of() -> Callable[..., Subject]:
    def subject(pair: Pair, **fields: Any) -> Subject:
        usual = {"bundle": Bundle.open(pair.bundle), "engine": "onnxruntime", "device": "cpu", "batch": 128}
        return Subject(**usual | fields)

    return subject
