"""The engines, one row each: all that the rest of the package knows of an engine before it is opened."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from .contract import Contract
from .engine import Engine
from .errors import EngineError


@dataclass(frozen=True)
class EngineKind:
    name: str
    runs: str  # what it runs, for people to read
    module: str  # has open_engines(name, models, device, exact_weights) -> list of engines
    libraries: tuple[str, ...]  # one of these modules is needed, besides torch
    packages: tuple[str, ...]  # its results depend on torch and on those of these that are installed
    extras: dict[str, tuple[str, ...]]  # by device: one of these extras of the package brings the library

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(self.extras)


ENGINES: dict[str, EngineKind] = {
    kind.name: kind
    for kind in (
        EngineKind(
            "onnxruntime",
            "the bundle's graphs, in ONNX Runtime",
            ".onnxruntime",
            ("onnxruntime",),
            ("onnxruntime", "onnxruntime-gpu"),
            {"cpu": ("cpu",), "cuda": ("cuda",)},
        ),
        EngineKind(
            "torch",
            "the same graphs as torch ops, converted for each shape of a round",
            ".torch_engine",
            ("onnx",),
            (),
            {"cpu": ("torch",), "cuda": ("torch",)},
        ),
        EngineKind(
            "torch-compiled",
            "those through `torch.compile`",
            ".torch_engine",
            ("onnx",),
            ("triton",),
            {"cpu": ("torch",), "cuda": ("torch",)},
        ),
        EngineKind(
            "tensorrt",
            "the plans that `trt-spec build` put into the bundle, of `tensorrt` or of `tensorrt_rtx`",
            ".tensorrt",
            ("tensorrt", "tensorrt_rtx"),
            ("tensorrt", "tensorrt-rtx"),
            {"cuda": ("tensorrt", "tensorrt-rtx")},
        ),
    )
}


def open_engine(
    name: str, graph: Path, contract: Contract, device: str = "cpu", *, exact_weights: bool = False
) -> Engine:
    """Open one graph in the engine of this name."""
    return open_engines(name, [(graph, contract)], device, exact_weights=exact_weights)[0]


def open_engines(
    name: str, models: Sequence[tuple[Path, Contract]], device: str = "cpu", *, exact_weights: bool = False
) -> list[Engine]:
    """Open graphs that take turns on one device; heavy libraries are imported only here.

    With `exact_weights`, quantised matrices are multiplied as the numbers they stand for, ten times slower. Without,
    an engine may round the other factor to int8 as well.
    """
    if name not in ENGINES:
        raise EngineError(f"there is no engine {name!r}; this version has: {', '.join(ENGINES)}")
    module = import_module(ENGINES[name].module, __package__)
    opened: list[Engine] = module.open_engines(name, models, device, exact_weights)
    return opened
