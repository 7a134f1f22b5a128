"""Keep torch's table of translations to ONNX from one trace to the next: making it takes most of a second."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from torch.onnx._internal.exporter._registration import ONNXRegistry

_make = ONNXRegistry.from_torchlib


@cache
def _table(opset_version: int) -> ONNXRegistry:
    return _make(opset_version)


@contextmanager
def translations_kept() -> Iterator[None]:
    """Let exports share one table; they must add no translation of their own."""
    setattr(ONNXRegistry, "from_torchlib", staticmethod(_table))  # noqa: B010
    try:
        yield
    finally:
        setattr(ONNXRegistry, "from_torchlib", _make)  # noqa: B010
