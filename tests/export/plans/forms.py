"""What kinds of layers a network has, in all that decides which kernels TensorRT needs for them."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import tensorrt_rtx as trt
from trt_spec.engines import Contract
from trt_spec.engines.tensorrt import PlanKey
from trt_spec.export.plans.compiler import Compiler

CLASSES = {name.lower(): kind for name, kind in vars(trt).items() if name.endswith("Layer")}
SIZED = {trt.LayerType.ATTENTION_INPUT, trt.LayerType.KV_CACHE_UPDATE}


def forms_of_plan(compiler: Compiler, graph: Path, contract: Contract, key: PlanKey) -> set[str]:
    """Do all that the compiler does but compile, its audit included, and give the forms of what it would compile."""
    found: set[str] = set()

    def compiled(network: Any, config: Any, **_: Any) -> bytes:
        found.update(forms(network[1]))
        return b""

    with patch("polygraphy.backend.trt.engine_bytes_from_network", compiled):
        compiler.compile(graph, contract, key, Path())
    return found


def forms(network: Any) -> set[str]:
    """Give each layer's kind, its settings, and what it reads and writes.

    Attention and cache updates have kernels for some sizes only, and are fused with what makes their inputs.
    """
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    makers = {layer.get_output(place).name: layer.type.name for layer in layers for place in range(layer.num_outputs)}

    def read(tensor: Any, sized: bool) -> tuple[Any, ...]:
        maker = makers.get(tensor.name)
        shape = (tuple(tensor.shape), maker) if sized else (len(tensor.shape), maker == "CONSTANT")
        return tensor.dtype.name, *shape

    found = set()
    for layer in layers:
        inputs = [layer.get_input(place) for place in range(layer.num_inputs)]
        reads = [None if tensor is None else read(tensor, layer.type in SIZED) for tensor in inputs]
        writes = [layer.get_output(place).dtype.name for place in range(layer.num_outputs)]
        found.add(f"{layer.type.name} {_settings(layer)} of {reads} to {writes}")
    return found


def _settings(layer: Any) -> dict[str, str]:
    """Give what a layer says of itself in choices and whole numbers."""
    kind = CLASSES[f"i{layer.type.name.replace('_', '').lower()}layer"]
    layer.__class__ = kind  # the bindings give the base class only
    named = ((name, getattr(layer, name)) for name in vars(kind) if name[0] != "_" and name != "weights")
    return {name: str(value) for name, value in named if isinstance(value, int) or hasattr(value, "__members__")}
