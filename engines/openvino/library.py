"""OpenVINO, if it is installed, and the one `Core` that compiles for the CPU in this process."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from ..errors import EngineError

VERSION = "2026.4"  # of OpenVINO: PagedAttention promises no other version the same inputs


def library() -> Any:
    """Return the package, of the version that engines need."""
    try:
        import openvino
    except ImportError as error:
        raise EngineError("engine openvino needs the openvino package; pip install 'trt-spec[openvino]'") from error
    if not openvino.__version__.startswith(VERSION):
        raise EngineError(
            f"engine openvino needs OpenVINO {VERSION}, found {openvino.__version__}; pip install 'trt-spec[openvino]'"
        )
    return openvino


@cache
def core(openvino: Any) -> Any:
    """Return the `Core` of this process, which has loaded the CPU plugin."""
    made = openvino.Core()
    with own_signal_stack():
        made.get_versions("CPU")
    return made


@contextmanager
def own_signal_stack() -> Iterator[None]:
    """Keep the stack that this thread handles signals on, though OpenVINO's CPU plugin is loaded during the block.

    On processors with AMX the plugin gives the thread another one, and unmaps it when the plugin ends. If that is in
    another thread, or before an older plugin ends, the next signal would kill the process.
    """
    if sys.platform != "linux":
        yield
        return
    libc, before = ctypes.CDLL(None), _SignalStack()
    libc.sigaltstack(None, ctypes.byref(before))
    try:
        yield
    finally:
        libc.sigaltstack(ctypes.byref(before), None)


class _SignalStack(ctypes.Structure):
    """`stack_t` of Linux."""

    _fields_ = (("place", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))
