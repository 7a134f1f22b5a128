"""The engine `onnxruntime`: the bundle's graphs in ONNX Runtime, on the CPU or a GPU."""

from .engine import OnnxRuntimeEngine, open_engines
from .session import GPU, nodes_elsewhere, open_session
from .threads import Threads, share_threads

__all__ = [
    "GPU",
    "OnnxRuntimeEngine",
    "Threads",
    "nodes_elsewhere",
    "open_engines",
    "open_session",
    "share_threads",
]
