"""Writes the blocks of 256 numbers that the library `gguf` reads and does not write, Q4_K and Q6_K, by rounding."""

import gguf
import numpy as np
from numpy.typing import NDArray

BLOCK = 256
Numbers, Bytes = NDArray[np.float32], NDArray[np.uint8]


def quantize(array: Numbers, kind: gguf.GGMLQuantizationType) -> Bytes:
    """Quantise rows of numbers as the library does, or as here."""
    name = gguf.GGMLQuantizationType(kind).name
    if name not in WRITERS:
        return gguf.quantize(array, kind)
    blocks = WRITERS[name](array.reshape(-1, BLOCK))
    return blocks.reshape(array.shape[0], -1)


def _q4_k(blocks: Numbers) -> Bytes:
    """Eight parts of 32 numbers, each with a scale and a minimum of six bits, of which two halves make numbers."""
    parts = blocks.reshape(len(blocks), 8, 32)
    lowest = np.minimum(parts.min(2), 0)
    scales, unit = _in_sixths((parts.max(2) - lowest) / 15)
    minima, least = _in_sixths(-lowest)
    step = np.maximum(unit.astype(np.float32)[:, None] * scales, 1e-9)[:, :, None]
    shift = (least.astype(np.float32)[:, None] * minima)[:, :, None]
    numbers = np.clip(np.round((parts + shift) / step), 0, 15).astype(np.uint8)
    low = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    middle = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    high = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    packed = numbers[:, 0::2] | numbers[:, 1::2] << 4
    return np.hstack([_bytes(unit), _bytes(least), low, middle, high, packed.reshape(len(blocks), -1)])


def _in_sixths(values: Numbers) -> tuple[Bytes, NDArray[np.float16]]:
    """Write eight values as numbers of six bits and a unit."""
    unit = (values.max(1) / 63).astype(np.float16)
    wide = np.maximum(unit.astype(np.float32), 1e-9)[:, None]
    return np.clip(np.round(values / wide), 0, 63).astype(np.uint8), unit


def _q6_k(blocks: Numbers) -> Bytes:
    """Sixteen parts of 16 numbers, each with a scale of eight bits, of which one half makes a number."""
    parts = blocks.reshape(len(blocks), 16, 16)
    wanted = np.abs(parts).max(2) / 31
    unit = (wanted.max(1) / 127).astype(np.float16)
    scales = np.round(wanted / np.maximum(unit.astype(np.float32), 1e-9)[:, None]).astype(np.int8)
    step = np.maximum(unit.astype(np.float32)[:, None] * scales, 1e-9)[:, :, None]
    numbers = (np.clip(np.round(parts / step), -32, 31) + 32).astype(np.uint8)
    groups = numbers.reshape(len(blocks), 2, 2, 2, 32)  # halves, nibbles, sides
    low = groups[:, :, 0] & 15 | (groups[:, :, 1] & 15) << 4
    fours = numbers.reshape(len(blocks), 2, 4, 32) >> 4
    high = fours[:, :, 0] | fours[:, :, 1] << 2 | fours[:, :, 2] << 4 | fours[:, :, 3] << 6
    flat = [one.reshape(len(blocks), -1) for one in (low, high)]
    return np.hstack([*flat, scales.view(np.uint8), _bytes(unit)])


def _bytes(halves: NDArray[np.float16]) -> Bytes:
    return halves.view(np.uint8).reshape(len(halves), 2)


WRITERS = {"Q4_K": _q4_k, "Q6_K": _q6_k}
