"""Lossless speculative decoding: export, engines, runtime and tools."""

__version__ = "0.1.0"
