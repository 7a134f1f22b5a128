"""The fused operators: for each a file that declares it, with torch's own operations on the CPU and Triton on CUDA.

Each is a `torch.library` operator in the namespace `trt_spec`, so a recorded graph holds one node for it. Its kernel
lies in `on_gpu/`, which alone imports Triton, when the operator first runs on CUDA.
"""

from collections.abc import Callable
from typing import Any

from . import gate

LAUNCHES: dict[str, int] = {"gate": 1}  # how many kernels each launches on CUDA

FUSED_OPS: dict[str, Callable[..., Any]] = {"trt_spec::Gate": gate.gate}
