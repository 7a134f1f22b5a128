"""Declares an operator in the namespace `trt_spec`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from typing import Any

import torch

from ...errors import EngineError, first_line

NAMESPACE = "trt_spec"


_composed = ContextVar("composed", default=False)


@contextmanager
def composed(yes: bool = True) -> Iterator[None]:
    """Let operators be the operations that they replace, which is what a CPU runs fastest."""
    before = _composed.set(yes)
    try:
        yield
    finally:
        _composed.reset(before)


def launcher(name: str, file: str) -> Callable[..., Any]:
    """Return what runs the kernel of an operator, which is in this file of `on_gpu/`."""

    def launch(*arguments: Any, **options: Any) -> Any:
        from triton.runtime.errors import TritonError

        try:
            with torch.cuda.device(arguments[0].device):  # Triton launches on the current one
                return getattr(import_module(f".on_gpu.{file}", __package__), name)(*arguments, **options)
        except TritonError as error:
            raise EngineError(
                f"Triton cannot run the kernel {name!r} of engine torch on this GPU ({first_line(error)}); it expects "
                "compute capability 8.0 or later; open the bundle in another engine, and report it if the GPU has that"
            ) from error

    return launch


def declare(name: str, schema: str, shape: Callable[..., Any], composition: Callable[..., Any]) -> Callable[..., Any]:
    """Declare an operator, and return it: torch's own operations on the CPU, the function of its name in `on_gpu/`.

    `shape` makes its output without data. It writes to those arguments alone that the schema gives an alias, and its
    kernel is in a file of the same name as the one that declares it.
    """
    full = f"{NAMESPACE}::{name}"
    kernel = composition.__module__.rpartition(".")[2]
    torch.library.define(full, schema)
    torch.library.impl(full, "cpu", composition)
    torch.library.impl(full, "cuda", launcher(name, kernel))
    torch.library.register_fake(full, shape)
    operator = getattr(torch.ops.trt_spec, name)
    return lambda *arguments, **options: (composition if _composed.get() else operator)(*arguments, **options)
