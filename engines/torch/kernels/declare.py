"""Declares an operator in the namespace `trt_spec`."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

NAMESPACE = "trt_spec"


def declare(name: str, schema: str, shape: Callable[..., Any], composition: Callable[..., Any]) -> Callable[..., Any]:
    """Declare an operator, and return it: torch's own operations on the CPU, the function of its name in `on_gpu/`.

    `shape` makes its output without data. It writes to those arguments alone that the schema gives an alias, and its
    kernel stands in a file of the same name as the one that declares it.
    """
    full = f"{NAMESPACE}::{name}"
    kernel = inspect.unwrap(composition).__module__.rpartition(".")[2]

    def launch(*arguments: Any) -> Any:
        return getattr(import_module(f".on_gpu.{kernel}", __package__), name)(*arguments)

    torch.library.define(full, schema)
    torch.library.impl(full, "cpu", composition)
    torch.library.impl(full, "cuda", launch)
    torch.library.register_fake(full, shape)
    operator: Callable[..., Any] = getattr(torch.ops.trt_spec, name)
    return operator
