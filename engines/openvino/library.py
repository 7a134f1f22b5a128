"""OpenVINO, if it is installed, and the one `Core` that compiles for the CPU in this process."""

from functools import cache
from typing import Any

from ..errors import EngineError

VERSION = "2026.4"  # of OpenVINO: PagedAttention promises no other version the same inputs


def core() -> Any:
    """Return the process's `Core`."""
    try:
        import openvino
    except ImportError as error:
        raise EngineError("engine openvino needs the openvino package; pip install 'trt-spec[openvino]'") from error
    if not openvino.__version__.startswith(VERSION):
        raise EngineError(
            f"engine openvino needs OpenVINO {VERSION}, found {openvino.__version__}; pip install 'trt-spec[openvino]'"
        )
    return _core(openvino)


@cache
def _core(openvino: Any) -> Any:
    """Make a `Core` that lives as long as the process.

    On processors with AMX its CPU plugin gives the thread that loads it another stack for signals, and unmaps that
    stack when the plugin ends. If it ended in another thread, or before an older plugin, the next signal would kill the
    process.
    """
    return openvino.Core()
