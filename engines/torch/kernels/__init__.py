"""The fused operators: for each a file that declares it, with torch's own operations on the CPU and Triton on CUDA.

Each is a `torch.library` operator in the namespace `trt_spec`, so a recorded graph holds one node for it. Its kernel
lies in `on_gpu/`, which alone imports Triton, when the operator first runs on CUDA.
"""

from collections.abc import Callable
from typing import Any

from . import angles, attention, entries, gate, narrow_product, norm, product
from .declare import composed
from .product import FEW_ROWS

LAUNCHES: dict[str, int | Callable[..., int]] = {  # how many kernels each has on CUDA, or has for its arguments
    "add_norm": 1,
    "angles": 1,
    "attention": 2,
    "gate": 1,
    "narrow_product": narrow_product.launches,
    "norm": 1,
    "norm_add": 1,
    "product": 1,
    "rotate": 1,
    "rotate_write": 1,
    "write": 1,
}

FUSED_OPS: dict[str, Callable[..., Any]] = {
    "trt_spec::AddNorm": norm.add_norm,
    "trt_spec::Angles": angles.angles,
    "trt_spec::Attention": attention.attention,
    "trt_spec::Gate": gate.gate,
    "trt_spec::NarrowProduct": narrow_product.narrow_product,
    "trt_spec::Norm": norm.norm,
    "trt_spec::NormAdd": norm.norm_add,
    "trt_spec::Product": product.product,
    "trt_spec::Rotate": entries.rotate,
    "trt_spec::RotateWrite": entries.rotate_write,
    "trt_spec::Write": entries.write,
}

__all__ = ["FEW_ROWS", "FUSED_OPS", "LAUNCHES", "composed"]
