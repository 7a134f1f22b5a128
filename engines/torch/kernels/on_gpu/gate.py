"""SiLU or GELU of one tensor times another, in one pass over both."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import by_number

BLOCK = 1024  # numbers a program


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:  # tanh(u) = 2 · sigmoid(2 u) - 1
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x


@triton.jit
def _gate(gate, up, out, size, gate_row, up_row, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = place < size
    x = tl.load(gate + row * gate_row + place, mask=live).to(tl.float32)
    y = tl.load(up + row * up_row + place, mask=live).to(tl.float32)
    tl.store(out + row * size + place, (activated(x, ACTIVATION) * y).to(out.dtype.element_ty), mask=live)


def gate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    size = gate.shape[-1]
    found = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gates, ups = (
        by_number(gate).reshape(-1, size),
        by_number(up).reshape(-1, size),
    )  # views, also of parts of one product
    _gate[(len(gates), triton.cdiv(size, BLOCK))](
        gates, ups, found, size, gates.stride(0), ups.stride(0), activation, BLOCK
    )
    return found
