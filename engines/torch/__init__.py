"""The engines `torch` and `torch-compiled`: the bundle's graphs as torch ops, on any torch device."""

from .engine import TorchEngine, open_engines
from .parallel import open_sharded

__all__ = ["TorchEngine", "open_engines", "open_sharded"]
