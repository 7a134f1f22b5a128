"""What is fused when the engine torch opens a graph, how often, and how many kernels a layer is left with."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from trt_spec.engines import Bundle, open_engine
from trt_spec.engines.torch import TorchEngine
from trt_spec.engines.torch.kernels import LAUNCHES

from ...bundles import export_pair
from ...families import tiny_checkpoint

FIRED = {  # in two layers
    "llama": {"products": 2, "norms": 5, "entries": 8, "gates": 2, "outputs": 1},
    "gpt2": {"products": 0, "norms": 0, "entries": 4, "gates": 0, "outputs": 1},
    "gemma2": {"products": 2, "norms": 9, "entries": 8, "gates": 2, "outputs": 0},
}
MOST_KERNELS = 11  # a layer, of which attention has two: its parts, and their sum
ATTENTION = {F.scaled_dot_product_attention: 2}


def opened(bundle: Path, name: str = "torch") -> TorchEngine:
    graph = Bundle.open(bundle)
    engine = open_engine(name, graph.graph("target"), graph.target.contract)
    assert isinstance(engine, TorchEngine)
    return engine


@pytest.mark.parametrize("family", FIRED)
def test_each_row_fires_as_often_as_its_nodes_stand_in_the_graph(pairs, family: str) -> None:
    assert opened(pairs(family).bundle).fused == FIRED[family]


def test_before_a_compiler_only_products_are_merged(llama) -> None:
    assert opened(llama.bundle, "torch-compiled").fused == {"products": 2}


WITHOUT_KERNEL = {"aten._unsafe_view.default"}  # besides views


class _Counting(TorchDispatchMode):
    """Counts what a GPU would run a kernel for."""

    kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = returns and returns[0].alias_info and not returns[0].alias_info.is_write
        self.kernels += not is_view and str(func) not in WITHOUT_KERNEL
        return func(*args, **(kwargs or {}))


class _Reading(fx.Interpreter):
    """Runs a recorded graph on tensors without data, and tells the kernels of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module.to("meta"))
        self.kernels: list[tuple[str, int]] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = str(target).rpartition(".")[2]
        with _Counting() as counting:
            found = super().call_function(target, args, kwargs)
        self.kernels.append((name, LAUNCHES.get(name, ATTENTION.get(target, counting.kernels))))
        return found


def kernels_of_a_layer(engine: TorchEngine, batch: int, width: int) -> list[tuple[str, int]]:
    """Of the third one: what there is once for all layers, as masks, is computed in the first."""
    sizes = {"batch": batch, "capacity": 512, "rows": width, "tail": width, "width": width}
    reading = _Reading(engine._convert(tuple(sorted(sizes.items()))))
    inputs = [*engine.contract.inputs, *engine._computed]
    shapes = [[sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape] for spec in inputs]
    dtypes = [getattr(torch, spec.dtype) for spec in inputs]
    reading.run(*[torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True)])
    _, first, second = (place for place, (name, _) in enumerate(reading.kernels) if name == "rotate_write")
    return [(name, count) for name, count in reading.kernels[first + 1 : second + 1] if count]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("llama", {}), ("qwen3", {"use_sliding_window": False, "layer_types": ["full_attention"] * 3})],
)
def test_a_layer_has_few_kernels(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    """As many as larger models of this form have, since sizes change none of them."""
    checkpoint = tiny_checkpoint(kind, tmp_path / "checkpoint", num_hidden_layers=3, **settings)
    engine = opened(export_pair(checkpoint, tmp_path / "bundle", dtype="bfloat16").bundle)
    for batch, width in ((1, 1), (1, 5), (8, 1), (8, 5)):
        found = kernels_of_a_layer(engine, batch, width)
        assert 8 < sum(count for _, count in found) <= MOST_KERNELS, found
