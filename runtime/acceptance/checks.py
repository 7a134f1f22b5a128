"""Checks the parameters of a request by type and range; errors say what was expected."""

import math
from typing import Any

from ...engines import RequestError

LARGEST = 1e6  # scores are float32 and must stay finite whatever a request multiplies, adds and divides


def whole(value: Any, low: int, high: float = math.inf) -> bool:
    return type(value) is int and low <= value <= high


def real(value: Any, low: float, high: float) -> bool:
    return type(value) in (int, float) and low <= value <= high


def require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value!r}, expected {expected}", name)
