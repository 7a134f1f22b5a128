"""Scripted models count, or scatter their tokens, and tests know what comes next."""

from collections.abc import Sequence


def counting(context) -> int:
    """A model that counts: after n comes n + 1, modulo the bytes."""
    return (context[-1] + 1) % 256


def counted(start: int, count: int) -> list[int]:
    return [(start + 1 + index) % 256 for index in range(count)]


def target(context: Sequence[int]) -> int:
    return (context[-1] * 7 + len(context)) % 256
