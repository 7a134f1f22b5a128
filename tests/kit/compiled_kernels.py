"""Compiles every kernel that a launch would run for a GPU that need not be there.

`python -m tests.kit.compiled_kernels 90 bfloat16` does it for compute capability 9.0 and one type of numbers. Triton's
interpreter runs Python; its compiler takes less, and needs no GPU.
"""

import inspect
import sys
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from .launches import LAUNCHED, launch

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
CAPABILITY, DTYPE = int(sys.argv[1]), getattr(torch, sys.argv[2])


def compile_launch(function: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> None:
    """In the place of `JITFunction.run`."""
    options = {name: named.pop(name) for name in ("num_warps", "num_stages") if name in named}
    bound = inspect.signature(function.fn).bind(*arguments, **named).arguments
    constants = {param.name for param in function.params if param.is_constexpr}
    constants |= {name for name, value in bound.items() if value is None}
    signature = {name: "constexpr" if name in constants else type_of(value) for name, value in bound.items()}
    values = {(place,): bound[name] for place, name in enumerate(bound) if name in constants}
    source = ASTSource(function, signature, values)
    triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options=options)


def type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"


if __name__ == "__main__":
    with patch.object(triton.JITFunction, "run", compile_launch):
        for name in LAUNCHED:
            launch(name, DTYPE)
            print(name)
