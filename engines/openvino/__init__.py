"""The engines `openvino` and `openvino-bfloat16`: the bundle's graphs in OpenVINO, over a cache in blocks."""

from .engine import OpenVinoEngine, open_engines
from .library import core, own_signal_stack
from .packing import NARROW

__all__ = ["NARROW", "OpenVinoEngine", "core", "open_engines", "own_signal_stack"]
