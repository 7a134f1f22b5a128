"""A launch of each fused operator's kernel, on tensors as an engine gives them."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from trt_spec.engines.torch.kernels.narrow_product import packed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
START = [8, 2]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def kernel(name: str, file: str) -> Any:
    return getattr(import_module(f"trt_spec.engines.torch.kernels.on_gpu.{file}"), name)


def heads(dtype: torch.dtype, size: int, value_size: int) -> list[Tensor]:
    """Queries, keys and values of three heads and two, two tokens and two rows, as parts of one product."""
    sizes = [3 * size, 2 * size, 2 * value_size]
    parts = random(2, 2, sum(sizes), dtype=dtype).split(sizes, -1)
    return [part.reshape(2, 2, -1, s).transpose(1, 2) for part, s in zip(parts, (size, size, value_size), strict=True)]


def caches(dtype: torch.dtype, size: int, value_size: int) -> list[Tensor]:
    """The first entries of longer caches."""
    return [random(2, 2, 16, s, dtype=dtype, seed=9)[:, :, :11] for s in (size, value_size)]


def angles(dtype: torch.dtype, count: int) -> list[Tensor]:
    turns = random(2, 2, count, seed=5)
    return [turns.cos().to(dtype), turns.sin().to(dtype)]


def matrix(kind: str, size: int, columns: int, blocks: int, dtype: torch.dtype) -> list[Tensor | None]:
    """As small numbers, with their scales and, of the kind `zeros`, zero points."""
    integers = torch.randint(-128, 128, (columns, size), generator=torch.Generator().manual_seed(3), dtype=torch.int8)
    narrow = integers >> 4
    of_floats = torch.where(integers.view(torch.uint8) & 127 == 127, 0, integers).view(torch.float8_e4m3fn)
    numbers = {"int8": integers, "int4": packed(narrow), "zeros": packed(narrow), "e4m3": of_floats}[kind]
    zeros = (narrow[:, :blocks] - 1).to(DEVICE) if kind == "zeros" else None
    return [numbers.to(DEVICE), (random(columns, blocks, seed=4) / 64).to(dtype), zeros]


def product(
    dtype: torch.dtype, rows: int, size: int, columns: int, biased: bool, added: bool, normed: bool, activation: str
) -> tuple[Any, ...]:
    """Of rows of one size with a matrix of so many columns, twice as many for a gate."""
    parts = 2 if activation else 1
    matrix = random(parts * columns, size, dtype=dtype, seed=1) / 32
    bias = random(parts * columns, dtype=dtype, seed=2) if biased else None
    residual = random(1, rows, columns, dtype=dtype, seed=3) if added else None
    scale = 2 * random(size, dtype=dtype, seed=4) if normed else None
    return random(1, rows, size, dtype=dtype), matrix, bias, residual, scale, 1e-6, 8.0, activation


def norms(dtype: torch.dtype) -> list[Tensor]:
    """A residual, what is added to it, and a scale."""
    return [random(2, 3, 100, dtype=dtype), random(2, 3, 100, dtype=dtype, seed=1), random(100, dtype=dtype, seed=2)]


def entries(dtype: torch.dtype) -> list[Tensor]:
    return [*heads(dtype, 64, 24), *angles(dtype, 16), torch.tensor(START, device=DEVICE), *caches(dtype, 64, 24)]


def positions(dtype: torch.dtype, width: int) -> tuple[Any, ...]:
    """Of tokens after one that is told of, in two rows; some lie beyond the tables, and before them."""
    start = torch.tensor([3, 17], device=DEVICE)
    depths = torch.arange(-1, width, device=DEVICE).expand(2, -1) * torch.tensor([[2], [3]], device=DEVICE)
    return start - 4, depths, *(random(20, 24, dtype=dtype, seed=seed) for seed in range(2)), width


def attention(dtype: torch.dtype, size: int, window: int, softcap: float, sinks: bool) -> tuple[Any, ...]:
    """Of five tokens in two rows, whose heads share key heads by four."""
    query, (key, value) = random(2, 5, 8, size, dtype=dtype).transpose(1, 2), caches(dtype, size, size)
    depths = torch.arange(5, device=DEVICE).expand(2, -1)
    ancestors = torch.ones(2, 5, 5, dtype=torch.bool, device=DEVICE).tril()
    scores = random(8, dtype=dtype) if sinks else None
    return query, key, value, torch.tensor([5, 2], device=DEVICE), depths, ancestors, scores, 0.1, softcap, window


def launch(name: str, dtype: torch.dtype) -> None:
    """Run the kernels of an operator."""
    file, given = LAUNCHED[name]
    for arguments in given(dtype):
        kernel(name, file)(*arguments)


# By operator: where its kernel stands, and the arguments of its launches.
LAUNCHED: dict[str, tuple[str, Callable[[torch.dtype], list[tuple[Any, ...]]]]] = {
    "add_norm": (
        "norm",
        lambda dtype: [
            (*norms(dtype), None, 1e-6, dtype),
            (*norms(dtype), norms(torch.float32)[2], 1e-6, dtype, 1e-5, dtype),
        ],
    ),
    "angles": (
        "angles",
        lambda dtype: [positions(dtype, 2)],
    ),
    "attention": (
        "attention",
        lambda dtype: [attention(dtype, 128, 4096, 50.0, True), attention(dtype, 256, 0, 0.0, False)],
    ),
    "gate": (
        "gate",
        lambda dtype: [(*norms(dtype)[:2], activation) for activation in ("silu", "gelu", "gelu_tanh")],
    ),
    "narrow_product": (
        "narrow_product",
        lambda dtype: [
            (random(1, rows, 96, dtype=dtype), *matrix(kind, 96, 24, 6, dtype))
            for rows in (1, 17, 129)
            for kind in ("int8", "int4", "zeros", "e4m3")
        ],
    ),
    "norm": ("norm", lambda dtype: [(*norms(dtype)[::2], 1e-6, dtype)]),
    "norm_add": ("norm", lambda dtype: [(*norms(dtype), 1e-6, dtype)]),
    "product": (
        "product",
        lambda dtype: [
            product(dtype, 5, 96, 24, True, True, True, ""),
            product(dtype, 1, 512, 4096, False, False, False, ""),
            *(product(dtype, 1, 1024, 8192, False, False, True, gate) for gate in ("silu", "gelu", "gelu_tanh")),
            product(dtype, 16, 64, 64 * 256, True, False, True, "silu"),
            product(dtype, 1, 64, 64 * 256, False, True, False, ""),
        ],
    ),
    "rotate": ("entries", lambda dtype: [(entries(dtype)[0], *entries(dtype)[3:5])]),
    "rotate_write": (
        "entries",
        lambda dtype: [tuple(entries(dtype)), (*entries(dtype), random(64), random(64), 1e-6, 1e-6)],
    ),
    "write": ("entries", lambda dtype: [(*entries(dtype)[1:3], *entries(dtype)[5:])]),
}
