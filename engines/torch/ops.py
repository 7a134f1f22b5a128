"""The torch equivalent of each ONNX operator in the exporter's graphs.

A function takes a node's inputs, None for one that is left out, and its attributes under their own names. A node is
refused when its graph is opened if its function does not know an attribute, or if a value differs from `FIXED`.
Constants are tensors with data, everything else is a meta tensor: shapes and axes are read while a graph is converted.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..onnx_types import dtype_of
from .attending import attention
from .between import best_of_shards, gather_shards, sum_shards
from .kernels import FUSED_OPS
from .kernels.entries import put, turned

FIXED: dict[str, Any] = {
    "alpha": 1.0,
    "batch_dims": 0,
    "beta": 1.0,
    "interleaved": 0,
    "fmod": 0,
    "is_causal": 0,
    "largest": 1,
    "mode": "linear",
    "noop_with_empty_axes": 0,
    "reduction": "none",
    "select_last_index": 0,
    "stash_type": 1,
    "transA": 0,
}
CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}  # by the axes that their windows move along
IGNORED = ("num_heads", "sorted")  # shapes say the first as well; the second does not matter


def _ints(tensor: Tensor) -> list[int]:
    if tensor.is_meta:
        raise ValueError("a shape or an axis depends on the data")
    numbers: list[int] = tensor.reshape(-1).tolist()
    return numbers


def _binary(function: Callable[[Tensor, Any], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: function(a, _number(b, a))


def _number(x: Tensor, beside: Tensor) -> Any:
    """Turn a constant of one number into that number, which takes no memory on the device."""
    one = not x.is_meta and beside.is_meta and x.numel() == 1 and x.dim() <= beside.dim()
    return x.item() if one else x


def _div(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, _number(b, a), rounding_mode=None if a.is_floating_point() else "trunc")


def _cast(x: Tensor, to: int) -> Tensor:
    return _as(x, dtype_of(to))


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == dtype else x.to(dtype)


def _clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    bounds = [None if bound is None else _number(bound, x) for bound in (low, high)]
    return torch.clamp(x, *bounds)


def _constant_of_shape(shape: Tensor, value: Tensor) -> Tensor:
    return torch.full(_ints(shape), value.item(), dtype=value.dtype)


def _dequantize(x: Tensor, scale: Tensor, zeros: Tensor | None = None, *, axis: int = 1, block_size: int = 0) -> Tensor:
    if not block_size:  # a scale for each place of the last axis, or for all
        return x.to(scale.dtype) * scale
    blocks = x.reshape(*x.shape[:axis], -1, block_size, *x.shape[axis + 1 :])
    blocks = blocks if zeros is None else blocks - zeros.unsqueeze(axis + 1)
    return (blocks.to(scale.dtype) * scale.unsqueeze(axis + 1)).reshape(x.shape)


def _expand(x: Tensor, shape: Tensor) -> Tensor:
    size = torch.broadcast_shapes(x.shape, _ints(shape))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return x if x.shape == size else x.expand(size)


def _gather(x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
    if not indices.dim():
        return x.select(axis, *_ints(indices))
    found: Tensor = x[(slice(None),) * (axis % x.dim()) + (indices,)]
    return found


def _gather_nd(x: Tensor, indices: Tensor) -> Tensor:
    found: Tensor = x[indices.unbind(-1)]
    return found


def _gemm(a: Tensor, b: Tensor, c: Tensor | None = None, transB: int = 0) -> Tensor:
    product = torch.matmul(a, b.t() if transB else b)
    return product if c is None else product + c


def _reduce(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x, axes, keepdims=1: function(x, dim=_ints(axes), keepdim=bool(keepdims))


def _scatter_nd(x: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return torch.index_put(x, indices.unbind(-1), updates)


def _layer_norm(x: Tensor, scale: Tensor, bias: Tensor | None = None, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    return F.layer_norm(x, x.shape[axis:], scale, bias, epsilon)


def _rms_norm(x: Tensor, scale: Tensor, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
    """Normalise in the type of `scale`, a tensor that may depend on the call's shape."""
    x, size = _as(x, scale.dtype), x.shape[axis:]
    return F.rms_norm(x, size, scale, epsilon) if scale.shape == size else F.rms_norm(x, size, eps=epsilon) * scale


def _reshape(x: Tensor, shape: Tensor, allowzero: int = 0) -> Tensor:
    size = _ints(shape)
    if not allowzero:
        size = [dim or x.shape[index] for index, dim in enumerate(size)]
    return x.reshape(size)


def _rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` [B, heads, S, D] by angles [B, S, D / 2]."""
    if (x.dim(), cos.dim()) != (4, 3) or 2 * cos.shape[2] != x.shape[3]:
        raise ValueError(
            f"{list(x.shape)} is rotated by angles {list(cos.shape)}, expected [B, heads, S, 2 D] by [B, S, D]"
        )
    return turned(x, cos, sin)


def _shape(x: Tensor, start: int = 0, end: int | None = None) -> Tensor:
    return torch.tensor(x.shape[start:end], dtype=torch.int64)


def _slice(x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor, steps: Tensor | None = None) -> Tensor:
    index = [slice(None)] * x.dim()
    every = [1] * len(starts) if steps is None else _ints(steps)
    for start, end, axis, step in zip(_ints(starts), _ints(ends), _ints(axes), every, strict=True):
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


def _split(x: Tensor, sizes: Tensor | None = None, axis: int = 0, num_outputs: int = 1) -> tuple[Tensor, ...]:
    return torch.split(x, -(-x.shape[axis] // num_outputs) if sizes is None else _ints(sizes), axis)


def _top_k(x: Tensor, count: Tensor, axis: int = -1) -> tuple[Tensor, Tensor]:
    [k] = _ints(count)
    return torch.topk(x, k, axis)


def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    rank = x.dim() + axes.numel()
    for axis in sorted(axis % rank for axis in _ints(axes)):
        x = x.unsqueeze(axis)
    return x


def _conv(
    x: Tensor,  # [B, channels, S], or an image
    weight: Tensor,
    bias: Tensor | None = None,
    strides: Sequence[int] = (),
    pads: Sequence[int] = (),
    dilations: Sequence[int] = (),
    group: int = 1,
    kernel_shape: Sequence[int] = (),
    auto_pad: str = "NOTSET",
) -> Tensor:
    if auto_pad != "NOTSET":
        raise ValueError(f"a convolution pads by the rule {auto_pad}, expected numbers")
    axes = x.dim() - 2
    begins, ends = list(pads[:axes]), list(pads[axes:])
    if axes not in CONVOLUTIONS or begins != ends:
        raise ValueError(f"a convolution has {axes} dimensions and pads by {pads}, expected up to three and two alike")
    found: Tensor = CONVOLUTIONS[axes](x, weight, bias, strides or 1, begins or 0, dilations or 1, group)
    return found


def _mean_of_windows(
    x: Tensor,  # an image
    kernel_shape: Sequence[int],
    strides: Sequence[int] = (),
    pads: Sequence[int] = (),
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    count_include_pad: int = 0,
) -> Tensor:
    if auto_pad not in ("NOTSET", "VALID") or any(pads) or ceil_mode:
        raise ValueError(f"windows are padded by {list(pads)} ({auto_pad}), expected none that leave the image")
    return F.avg_pool2d(x, list(kernel_shape), list(strides) or None)


def _tensor_scatter(past: Tensor, rows: Tensor, start: Tensor, axis: int = -2) -> Tensor:
    """Write in place; the output is the memory of `past` [B, kv_heads, T, D]."""
    if axis % past.dim() != 2 or past.dim() != 4:
        raise ValueError(f"the cache is written along the axis {axis}, expected axis 2 of 4")
    return put(past, rows, start)


def _cast_into(x: Tensor, place: Tensor) -> Tensor:
    return place.copy_(x)


def _widened(numbers: Tensor, scales: Tensor, to: int) -> Tensor:
    wide = numbers.to(dtype_of(to))
    return torch.mul(wide, scales, out=wide)


def _product_into(x: Tensor, matrix: Tensor, place: Tensor, transposed: int) -> Tensor:
    matrix = matrix.t() if transposed else matrix
    torch.mm(x.reshape(-1, x.shape[-1]), matrix, out=place.view(-1, place.shape[-1]))
    return place


OPS: dict[str, Callable[..., Any]] = {
    "Abs": torch.abs,
    "Add": _binary(torch.add),
    "And": torch.logical_and,
    "ArgMax": lambda x, axis=0, keepdims=1: torch.argmax(x, axis, bool(keepdims)),
    "Attention": attention,
    "AveragePool": _mean_of_windows,
    "Cast": _cast,
    "Clip": _clip,
    "Concat": lambda *tensors, axis: torch.cat(tensors, axis),
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "Cos": torch.cos,
    "DequantizeLinear": _dequantize,
    "Div": _div,
    "Equal": _binary(torch.eq),
    "Exp": torch.exp,
    "Expand": _expand,
    "Floor": torch.floor,
    "Gather": _gather,
    "GatherElements": lambda x, indices, axis=0: torch.gather(x, axis, indices),
    "GatherND": _gather_nd,
    "Gelu": lambda x, approximate="none": F.gelu(x, approximate=approximate),
    "Gemm": _gemm,
    "GreaterOrEqual": _binary(torch.ge),
    "Greater": _binary(torch.gt),
    "LayerNormalization": _layer_norm,
    "Less": _binary(torch.lt),
    "LessOrEqual": _binary(torch.le),
    "Log": torch.log,
    "MatMul": torch.matmul,
    "Max": lambda *tensors: reduce(torch.maximum, tensors),
    "Min": lambda *tensors: reduce(torch.minimum, tensors),
    "Mod": _binary(torch.remainder),
    "Mul": _binary(torch.mul),
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Or": torch.logical_or,
    "Pow": _binary(torch.pow),
    "RMSNormalization": _rms_norm,
    "Range": lambda start, limit, delta: torch.arange(start.item(), limit.item(), delta.item()),
    "Reciprocal": torch.reciprocal,
    "ReduceMax": _reduce(torch.amax),
    "ReduceMean": _reduce(torch.mean),
    "ReduceSum": _reduce(torch.sum),
    "Relu": torch.relu,
    "Reshape": _reshape,
    "RotaryEmbedding": _rotary,
    "Round": torch.round,
    "ScatterElements": lambda x, indices, updates, axis=0: torch.scatter(x, axis, indices, updates),
    "ScatterND": _scatter_nd,
    "Shape": _shape,
    "Sigmoid": torch.sigmoid,
    "Sin": torch.sin,
    "Slice": _slice,
    "Softmax": lambda x, axis=-1: torch.softmax(x, axis),
    "Softplus": F.softplus,
    "Split": _split,
    "Sqrt": torch.sqrt,
    "Squeeze": lambda x, axes=None: x.squeeze() if axes is None else x.squeeze(_ints(axes)),
    "Sub": _binary(torch.sub),
    "Tanh": torch.tanh,
    "TensorScatter": _tensor_scatter,
    "Tile": lambda x, repeats: x.repeat(_ints(repeats)),
    "TopK": _top_k,
    "Transpose": lambda x, perm: x.permute(perm),
    "Unsqueeze": _unsqueeze,
    "Where": torch.where,
    "trt_spec::AllGather": gather_shards,
    "trt_spec::AllReduce": sum_shards,
    "trt_spec::BestOfShards": best_of_shards,
    "trt_spec::BiasedProduct": lambda x, matrix, bias: F.linear(x, matrix.t(), bias),
    "trt_spec::CastInto": _cast_into,
    "trt_spec::ProductInto": _product_into,
    "trt_spec::Widened": _widened,
    **FUSED_OPS,
}
