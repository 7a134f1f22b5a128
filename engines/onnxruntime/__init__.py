"""The engine `onnxruntime`: the bundle's graphs in ONNX Runtime, on the CPU or a GPU."""

from .engine import GPU, OnnxRuntimeEngine, Threads, nodes_elsewhere, open_engines, open_session, share_threads

__all__ = [
    "GPU",
    "OnnxRuntimeEngine",
    "Threads",
    "nodes_elsewhere",
    "open_engines",
    "open_session",
    "share_threads",
]
