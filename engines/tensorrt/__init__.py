"""The engine `tensorrt`, and what it shares with the compiler of its plans: the libraries and the plans' sidecars."""

from .engine import TensorRTEngine, open_engines
from .library import LIBRARIES, Library, capability_of
from .plans import CompiledPlan, PlanKey, Ranges, read_plan

__all__ = [
    "LIBRARIES",
    "CompiledPlan",
    "Library",
    "PlanKey",
    "Ranges",
    "TensorRTEngine",
    "capability_of",
    "open_engines",
    "read_plan",
]
