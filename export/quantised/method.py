"""Describe a method: the tensors that hold one matrix, and how they become it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...engines import ExportError

Settings = Mapping[str, Any]  # quantization_config of a config.json
Parts = Mapping[str, Tensor]  # the tensors that hold one matrix, by the endings of their names


@dataclass(frozen=True)
class Centred:
    """A matrix as small numbers, whole ones less the middle of their range, with a scale for each group of columns."""

    numbers: Tensor  # [N, K] int8 or float8_e4m3fn
    zeros: Tensor  # [N, G] int8: zero points, less the same middle
    scales: Tensor  # [N, G] float32
    bits: int
    whole: Tensor | None = None  # [] of NVFP4, whose scales are float8_e4m3fn, to be multiplied by this


@dataclass(frozen=True)
class Method:
    """How one method stores a matrix: in several tensors, whose names begin alike."""

    needs: tuple[frozenset[str], ...]  # endings that together are a matrix, one set for each way to store it
    may_have: frozenset[str]  # endings of what may be there besides
    matrix: Callable[[Parts, Settings], Tensor]  # in float32
    words: Callable[[Settings], str]  # what a user should know of the settings; refuses what is not supported
    centred: Callable[[Parts, Settings], Centred | None] = lambda parts, settings: None
    whole: str = ".weight"  # the ending of the matrix's name in the model that is not quantised


def number(settings: Settings, name: str, allowed: tuple[int, ...] | None = None) -> int:
    """Return a whole number of the settings, or say what is there instead."""
    value = settings.get(name)
    if type(value) is not int or (allowed is not None and value not in allowed):
        expected = "a whole number" if allowed is None else " or ".join(map(str, allowed))
        raise ExportError(f"{name} is {value!r}, expected {expected}")
    return value


def refuse_shape(tensor: Tensor, expected: tuple[int, ...], ending: str) -> None:
    if tuple(tensor.shape) != expected:
        raise ExportError(f"{ending} has the shape {list(tensor.shape)}, expected {list(expected)}")


def in_groups(group: int) -> str:
    return "one scale a channel" if group == -1 else f"groups of {group}"


def unpack(words: Tensor, bits: int) -> Tensor:
    """Take the numbers `[N, C × 32 / bits]` out of words `[N, C]` of 32 bits each, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    numbers = (words[..., None] >> shifts) & ((1 << bits) - 1)  # [N, C, 32 / bits]
    return numbers.to(torch.uint8).flatten(-2)


def spread(scales: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """Give each number of a matrix `[…, N, K]` the scale of its block; the last blocks may be smaller."""
    rows, columns = shape[-2:]
    expected = (*shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    refuse_shape(scales, expected, "the tensor of scales")
    wide = scales.float().repeat_interleave(block[0], -2)[..., :rows, :]
    return wide.repeat_interleave(block[1], -1)[..., :columns]


def centre(numbers: Tensor, bits: int) -> Tensor:
    """Take the middle of their range off numbers of so many bits."""
    return (numbers.to(torch.int16) - (1 << (bits - 1))).to(torch.int8)


def powers_of_two(exponents: Tensor) -> Tensor:
    """Read bytes as exponents with a bias of 127 (E8M0), of which 255 is no number."""
    powers = torch.ldexp(torch.ones(exponents.shape), exponents.to(torch.int32) - 127)
    return powers.masked_fill_(exponents == 255, torch.nan)
