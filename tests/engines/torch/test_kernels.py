"""Each fused operator's kernel computes what torch's own operations do, interpreted where there is no GPU."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor
from trt_spec.engines.torch import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_computes(name: str, kernel: str, *arguments: Any) -> None:
    """The kernel is as near to the operation in float64 as torch's operations, within a few roundings of the output."""
    found = getattr(import_module(f"trt_spec.engines.torch.kernels.on_gpu.{kernel}"), name)(*arguments)
    wide = [x.cpu().double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
    expected = getattr(torch.ops.trt_spec, name)(*wide)
    for own, exact in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
        rounding = torch.finfo(own.dtype).eps
        torch.testing.assert_close(own.cpu().double(), exact, rtol=2 * rounding, atol=8 * rounding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gate(dtype: torch.dtype, activation: str) -> None:
    """Of parts of one product, of a size that fills no block."""
    both = random(2, 3, 2 * 1100, dtype=dtype)
    assert_computes("gate", "gate", *both.split(1100, -1), activation)


def test_each_operator_says_how_many_kernels_it_launches() -> None:
    declared = {name for name in dir(torch.ops.trt_spec) if not name.startswith("_") and name != "name"}
    assert set(kernels.LAUNCHES) == declared
