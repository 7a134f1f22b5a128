"""Keep torch's table of translations to ONNX from one trace to the next: making it takes most of a second."""

from contextlib import AbstractContextManager
from functools import cache

from torch.onnx._internal.exporter._registration import ONNXRegistry

from .swapping import swapped

_make = ONNXRegistry.from_torchlib


@cache
def _table(opset_version: int) -> ONNXRegistry:
    return _make(opset_version)


def translations_kept() -> AbstractContextManager[None]:
    """Let exports share one table; they must add no translation of their own."""
    return swapped(ONNXRegistry, from_torchlib=staticmethod(_table))
