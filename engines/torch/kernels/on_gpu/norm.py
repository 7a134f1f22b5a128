"""Root-mean-square norms, one program a row, which stays in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .layout import by_number


@triton.jit
def _norms(
    x,
    residual,
    first,
    scale,
    total,
    found,
    heads,  # rows lie in groups of so many
    x_group,
    x_row,
    residual_row,
    first_epsilon,
    epsilon,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    ADD: tl.constexpr,
    LAST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    live = place < SIZE
    begin = row // heads * x_group + row % heads * x_row
    value = tl.load(x + begin + place, mask=live, other=0.0).to(tl.float32)
    if FIRST:
        value *= tl.rsqrt(tl.sum(value * value) / SIZE + first_epsilon)
        value *= tl.load(first + place, mask=live, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * residual_row + place, mask=live, other=0.0).to(tl.float32)
        stored = value.to(total.dtype.element_ty)
        tl.store(total + row * SIZE + place, stored, mask=live)
        value = stored.to(tl.float32)  # what is normed is what others read
    if LAST:
        value *= tl.rsqrt(tl.sum(value * value) / SIZE + epsilon)
        value *= tl.load(scale + place, mask=live, other=0.0).to(tl.float32)
        tl.store(found + row * SIZE + place, value.to(found.dtype.element_ty), mask=live)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    first: Tensor | None,
    scale: Tensor | None,
    total: Tensor | None,
    found: Tensor | None,
    first_epsilon: float,
    epsilon: float,
) -> None:
    x, size = by_number(x), x.shape[-1]
    groups = x.reshape(-1, x.shape[-2], size) if x.dim() > 3 else x.reshape(-1, 1, size)
    residuals = None if residual is None else by_number(residual).reshape(-1, size)
    block = triton.next_power_of_2(size)
    _norms[(groups.shape[0] * groups.shape[1],)](
        x=groups,
        residual=residuals,
        first=first,
        scale=scale,
        total=total,
        found=found,
        heads=groups.shape[1],
        x_group=groups.stride(0),
        x_row=groups.stride(1),
        residual_row=0 if residuals is None else residuals.stride(0),
        first_epsilon=first_epsilon,
        epsilon=epsilon,
        SIZE=size,
        BLOCK=block,
        FIRST=first is not None,
        ADD=residual is not None,
        LAST=scale is not None,
        num_warps=min(16, max(1, block // 512)),
    )


def norm(x: Tensor, scale: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    found = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch(x, None, None, scale, None, found, 0.0, epsilon)
    return found


def add_norm(
    residual: Tensor,
    x: Tensor,
    scale: Tensor,
    first: Tensor | None,
    epsilon: float,
    dtype: torch.dtype,
    first_epsilon: float = 0.0,
    first_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    summed = torch.promote_types(residual.dtype, first_dtype or x.dtype)
    total = torch.empty(x.shape, dtype=summed, device=x.device)
    found = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch(x, residual, first, scale, total, found, first_epsilon, epsilon)
    return total, found


def norm_add(residual: Tensor, x: Tensor, scale: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    total = torch.empty(x.shape, dtype=torch.promote_types(residual.dtype, dtype), device=x.device)
    _launch(x, residual, scale, None, total, None, epsilon, 0.0)
    return total
