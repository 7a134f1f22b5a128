"""Declares an operator in the namespace `trt_spec`."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

NAMESPACE = "trt_spec"


def declare(
    name: str, schema: str, shape: Callable[..., Any], composition: Callable[..., Any], kernel: str
) -> Callable[..., Any]:
    """Declare an operator, and return it: torch's own operations on the CPU, a function of the module `kernel` on CUDA.

    `shape` makes its output without data. What lists no alias in the schema writes to none of its arguments.
    """
    full = f"{NAMESPACE}::{name}"
    torch.library.define(full, schema)
    torch.library.impl(full, "cpu", composition)
    torch.library.register_fake(full, shape)

    def launch(*arguments: Any) -> Any:
        module = import_module(f".on_gpu.{kernel}", __package__)
        return getattr(module, name)(*arguments)

    torch.library.impl(full, "cuda", launch)
    operator: Callable[..., Any] = getattr(torch.ops.trt_spec, name)
    return operator
