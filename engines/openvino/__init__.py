"""The engines `openvino` and `openvino-bfloat16`: the bundle's graphs in OpenVINO, over a cache in blocks."""

from .engine import NARROW, OpenVinoEngine, open_engines

__all__ = ["NARROW", "OpenVinoEngine", "open_engines"]
