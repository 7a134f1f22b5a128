"""What was measured on a GPU, with the kernels that were launched there, and how well the model of the GPU gives it.

The launches are `[kind, bytes, rows, how many]`, counted by `gpu_steps` in the graphs of that time: those of later
graphs, which are fewer, do not belong to these times.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from .gpu_launches import Launch
from .gpu_model import predicted_ms
from .gpus import Gpu

FILE = Path(__file__).with_name("gpu_figures.json")


class Compared(NamedTuple):
    """A figure as it was measured and as it is predicted."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@cache
def figures() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def launches_of(name: str) -> list[Launch]:
    return [Launch(kind, size, rows) for kind, size, rows, count in figures()["launches"][name] for _ in range(count)]


def compare() -> dict[str, list[Compared]]:
    """Return every figure beside its prediction: milliseconds, ratios of times, and counts of kernels."""
    found = figures()
    gpu = Gpu(found["gpu"], found["bandwidth_bytes_per_second"])

    def ms(name: str) -> float:
        return predicted_ms(launches_of(name), gpu)

    return {
        "ms": [Compared(one["name"], one["ms"], ms(one["launches"])) for one in found["times"]],
        "ratio": [
            Compared(one["name"], one["ratio"], ms(one["launches"]) / ms(one["over"])) for one in found["ratios"]
        ],
        "kernels": [
            Compared(one["name"], one["kernels"], len(launches_of(one["launches"]))) for one in found["kernels"]
        ],
    }


def worst_error() -> float:
    return max(abs(one.error) for each in compare().values() for one in each)
