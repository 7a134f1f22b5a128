"""The table of engines: the rest of the package knows no more of an engine before it is opened."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from .contract import CALL, IMAGE, ROW, SOURCE, TOKEN, WINDOW, AnyContract
from .engine import Engine
from .errors import EngineError


@dataclass(frozen=True)
class EngineKind:
    name: str
    runs: str  # for people to read
    module: str  # has open_engines(name, models, device, exact_weights, alone) -> list of engines
    libraries: tuple[str, ...]  # one of these modules is needed, besides torch
    packages: tuple[str, ...]  # its results depend on torch and on those of these that are installed
    extras: dict[str, tuple[str, ...]]  # by device: one of these extras of the package brings the library
    computes_in: str | None = None  # a dtype other than the bundle's own, which makes it another model
    states: tuple[str, ...] = (TOKEN,)  # the kinds that it takes
    lacks: tuple[str, ...] = ()  # kinds of stored weights that it has no kernels for
    adapters: bool = False  # it runs graphs with room for adapters
    shards: bool = False  # and graphs in shards: its module has open_sharded(name, graph, contract, devices)
    encodes_in: str = "torch"  # the engine of encoders beside it: sources have many lengths, and each is read once
    sees_in: str = ""  # that of the graph that sees, if it is another one

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
            states=(TOKEN, WINDOW, ROW, CALL, SOURCE, IMAGE),
            adapters=True,
            lacks=("nvfp4",),
            encodes_in="onnxruntime",
        ),
        EngineKind(
            "openvino",
            "the same graphs in OpenVINO, over a cache in blocks",
            ".openvino",
            ("openvino",),
            ("openvino",),
            {"cpu": ("openvino",)},
            adapters=True,
        ),
        EngineKind(
            "openvino-bfloat16",
            "those in bfloat16, where the processor has it: another model, and faster",
            ".openvino",
            ("openvino",),
            ("openvino",),
            {"cpu": ("openvino",)},
            computes_in="bfloat16",
        ),
        EngineKind(
            "torch",
            "the same graphs as torch ops, converted for each shape of a round",
            ".torch",
            ("onnx",),
            (),
            {"cpu": ("torch",), "cuda": ("torch",)},
            states=(TOKEN, WINDOW, ROW, CALL, SOURCE, IMAGE),
            adapters=True,
            shards=True,
        ),
        EngineKind(
            "torch-compiled",
            "those through `torch.compile`",
            ".torch",
            ("onnx",),
            ("triton",),
            {"cpu": ("torch",), "cuda": ("torch",)},
            states=(TOKEN, WINDOW, ROW, CALL, SOURCE, IMAGE),
            adapters=True,
            shards=True,
        ),
        EngineKind(
            "tensorrt",
            "the plans that `trt-spec build` put into the bundle, of `tensorrt` or of `tensorrt_rtx`",
            ".tensorrt",
            ("tensorrt", "tensorrt_rtx"),
            ("tensorrt", "tensorrt-rtx"),
            {"cuda": ("tensorrt", "tensorrt-rtx")},
            states=(TOKEN, WINDOW, ROW, CALL, SOURCE, IMAGE),
            adapters=True,
            sees_in="tensorrt",
        ),
    )
}


def open_engine(
    name: str, graph: Path, contract: AnyContract, device: str = "cpu", *, exact_weights: bool = False
) -> Engine:
    """Open one graph in the engine of this name."""
    return open_engines(name, [(graph, contract)], device, exact_weights=exact_weights)[0]


def together(target: str, draft: str | None) -> str:
    """Name the engines of a decoder: one for all models, or the target's and that of its drafts."""
    return target if draft in (None, target) else f"{target}+{draft}"


def engines_of(name: str) -> tuple[str, str]:
    """Return the engines of the target and of its drafts that `together` names."""
    target, _, draft = name.partition("+")
    return target, draft or target


def open_engines(
    engines: str | Sequence[str],
    models: Sequence[tuple[Path, AnyContract]],
    device: str = "cpu",
    *,
    exact_weights: bool = False,
    devices: Sequence[str] = (),
) -> list[Engine]:
    """Open graphs that take turns on one device, all in one engine or each in its own.

    A graph in shards runs on several `devices`, the first of which is that of the others; without, `device` names them.

    Heavy libraries are imported only here.

    With `exact_weights`, quantised matrices are multiplied as the numbers they stand for, ten times slower. Without,
    an engine may round the other factor to int8 as well.
    """
    names = [engines] * len(models) if isinstance(engines, str) else list(engines)
    for name in names:
        if name not in ENGINES:
            raise EngineError(f"there is no engine {name!r}; this version has: {', '.join(ENGINES)}")
    for name, (graph, contract) in zip(names, models, strict=True):
        _refuse_states(ENGINES[name], graph, contract)
        _refuse_shards(ENGINES[name], graph, contract, devices or devices_of(device, contract.shards))
    opened: dict[int, Engine] = {}
    try:
        for name in dict.fromkeys(names):
            module = import_module(ENGINES[name].module, __package__)
            for place, (graph, contract) in enumerate(models):
                if names[place] == name and contract.shards > 1:
                    opened[place] = module.open_sharded(
                        name, graph, contract, devices or devices_of(device, contract.shards)
                    )
            places = [place for place, one in enumerate(names) if one == name and place not in opened]
            alone = len(set(names)) == 1  # with models in another engine, all have to share the cores
            takes = [models[place] for place in places]
            if not ENGINES[name].adapters:
                takes = [(graph, contract.without_adapters) for graph, contract in takes]
            some = module.open_engines(name, takes, device, exact_weights, alone)
            opened |= zip(places, some, strict=True)
    except BaseException:
        for engine in opened.values():
            engine.close()
        raise
    return [opened[place] for place in range(len(names))]


def _refuse_states(engine: EngineKind, graph: Path, contract: AnyContract) -> None:
    """Refuse a graph with a state of a kind that the engine does not take."""
    for state in contract.states:
        if state.kind not in engine.states:
            others = [one.name for one in ENGINES.values() if state.kind in one.states]
            raise EngineError(
                f"engine {engine.name} takes no state of the kind {state.kind!r}, {graph} has {state}; "
                f"use engine {' or '.join(others)}"
            )


def _refuse_shards(engine: EngineKind, graph: Path, contract: AnyContract, devices: Sequence[str]) -> None:
    if contract.shards == 1:
        return
    if not engine.shards:
        able = " or ".join(one.name for one in ENGINES.values() if one.shards)
        raise EngineError(
            f"engine {engine.name} runs no shards, {graph} is one of {contract.shards}; use engine {able}"
        )
    if len(devices) != contract.shards:
        raise EngineError(
            f"{graph} is one of {contract.shards} shards, {len(devices)} devices are given; name one for each"
        )


def devices_of(device: str, shards: int) -> list[str]:
    """Name a device for each shard, where only their kind was named, or the only one."""
    if shards == 1 or ":" in device:
        return [device]
    return [device if device == "cpu" else f"{device}:{number}" for number in range(shards)]


def refuse_weights(engine: str, model: str, weights: str) -> None:
    """Refuse a model whose weights are of a kind that the engine lacks."""
    if engine in ENGINES and weights in ENGINES[engine].lacks:
        others = [one.name for one in ENGINES.values() if weights not in one.lacks]
        raise EngineError(
            f"engine {engine} has no kernels for {weights}, in which the {model} has its weights; "
            f"use engine {' or '.join(others)}"
        )
