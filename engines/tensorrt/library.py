"""The two TensorRT libraries, `tensorrt` and `tensorrt_rtx`, by one interface."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from ..errors import first_line

LIBRARIES = {"tensorrt": "tensorrt", "tensorrt-rtx": "tensorrt_rtx"}  # the modules to import


def capability_of(device: str = "cuda") -> str:
    """Return a GPU's compute capability as plans name it, such as 8.9."""
    return ".".join(map(str, torch.cuda.get_device_capability(device)))


class Library:
    """One of the two libraries, imported."""

    def __init__(self, engine: str) -> None:
        self.engine, self.is_rtx = engine, engine == "tensorrt-rtx"
        self.trt: Any = import_module(LIBRARIES[engine])
        self.version = str(self.trt.__version__)


class RuntimeLibrary(Library):
    """One of the two libraries, ready to run plans."""

    def __init__(self, engine: str) -> None:
        super().__init__(engine)
        self.complaints: list[str] = []  # the latest last
        self.runtime: Any = self.trt.Runtime(_logger(self.trt, self.complaints))

    def settings(self, engine: Any, cache_file: Path) -> tuple[Any, Any]:
        """Return a cache of kernels compiled at run time, which only RTX has, and the configuration of a context."""
        settings = engine.create_runtime_config()
        settings.set_execution_context_allocation_strategy(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if not hasattr(settings, "create_runtime_cache"):
            return None, settings
        cache = settings.create_runtime_cache()
        if cache_file.exists():
            cache.deserialize(cache_file.read_bytes())  # refused, and made anew, if another driver or GPU wrote it
        settings.set_runtime_cache(cache)
        # Otherwise a round would be recorded with the substitutes that run until its kernels are compiled.
        settings.dynamic_shapes_kernel_specialization_strategy = (
            self.trt.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        return cache, settings


def _logger(trt: Any, complaints: list[str]) -> Any:
    class Logger(trt.ILogger):  # type: ignore[misc]  # an untyped base
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                complaints.append(first_line(message))

    return Logger()
