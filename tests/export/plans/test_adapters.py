"""TensorRT plans of graphs that have room for adapters: compiled for RTX, from graphs that say what was exported."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from trt_spec.engines import Adapters, Bundle, Contract, keys_and_values, line
from trt_spec.engines.tensorrt import PlanKey, read_plan
from trt_spec.export.passes.quantise import Quantisation
from trt_spec.export.plans.build import build_plans
from trt_spec.export.plans.compiler import prepare
from trt_spec.export.plans.roles import BuildOptions, Role, with_more_of_target

from ...kit.bundles import export_pair
from ...kit.models import tiny_llama
from .running import run

ROOM = {"adapters": 4, "adapter_rank": 4}
COLUMNS = (("columns", 4, 16),)


def test_roles_of_the_target_alone_are_there_with_adapters_too() -> None:
    found = [Role("verify", "target", 4, 4, (1, 8)), Role("first", "draft", 2, 1, (1, 8))]
    contract = Contract(1, 2, keys_and_values(1, 2, 16, "float32"), 64, 256, "float32")
    room = replace(contract, adapters=Adapters(4, 4, ()))
    assert with_more_of_target(found, room) == [*found, Role("verify, adapters", "target", 4, 4, (1, 8), COLUMNS)]
    assert with_more_of_target(found, contract) == found
    several = with_more_of_target(found, replace(room, shards=2))
    names = ["verify", "verify, adapters", "verify, shard 1", "verify, adapters, shard 1"]
    assert [(one.name, one.shard) for one in several if one.model == "target"] == list(
        zip(names, (0, 0, 1, 1), strict=True)
    )


@pytest.mark.usefixtures("compiled_here")
def test_the_target_has_plans_with_room_for_any_number_of_them_and_plans_without(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target", num_hidden_layers=1)
    path = export_pair(target, tmp_path / "bundle", max_length=64, dtype="float16", **ROOM).bundle
    options = BuildOptions("tensorrt-rtx", ["8.9"], batch=(1, 4), draft_length=3, prefill_width=0)
    report = build_plans(path, options)
    plain, adapted = report.plans
    contract = report.bundle.target.contract
    assert (plain.role, plain.key.ranges) == ("verify", ())
    assert (adapted.role, adapted.key.ranges) == ("verify, adapters", COLUMNS)
    assert plain.inputs == [str(spec) for spec in contract.without_adapters.inputs]
    assert adapted.inputs == [str(spec) for spec in contract.inputs]
    assert read_plan((path / adapted.key.path).with_suffix(".json")) == adapted
    assert build_plans(path, options).built == 0


@pytest.mark.parametrize("weights", ["none", "int8"])
def test_what_tensorrt_gets_has_the_numbers_of_the_exported_graph(tmp_path: Path, weights: str) -> None:
    settings = ROOM if weights == "none" else ROOM | {"weights": Quantisation(weights)}
    target = tiny_llama(tmp_path / "target", num_hidden_layers=1)
    bundle = Bundle.open(export_pair(target, tmp_path / "bundle", max_length=64, **settings).bundle)
    contract, room = bundle.target.contract, bundle.target.contract.adapters
    assert room is not None
    key = PlanKey("target", "", "tensorrt-rtx", "", "8.9", 3, 3, (1, 4), bundle.capacity, ranges=COLUMNS)
    graph = bundle.graph("target").with_name(key.file)
    random = np.random.default_rng(0)
    feeds = {
        "input_ids": random.integers(64, size=(3, 3)),
        "start": np.array([0, 7, 40]),
        "logit_rows": np.tile(np.arange(3), (3, 1)),
        "adapter": np.array([2, 0, 1]),
        "owners": np.repeat([1, 2], 4),
        **{name: tensor.numpy() for name, tensor in line(3, 3, "cpu").items()},
        **{
            f"past_{state.name}": random.standard_normal(state.memory(3, bundle.capacity), dtype=np.float32)
            for state in contract.states
        },
        **{
            spec.name: random.standard_normal((8, *spec.shape[1:]), dtype=np.float32)
            for spec in contract.inputs
            if spec.name in room.names
        },
    }
    compare = partial(np.testing.assert_allclose, atol=2e-4, rtol=1e-4)
    ours = run(prepare(graph, key)[0], feeds, graph.parent)
    theirs = run(ir.load(graph), feeds, graph.parent)
    for one, other in zip(ours, theirs, strict=True):
        compare(one, other)
    swapped = run(prepare(graph, key)[0], feeds | {"adapter": np.array([1, 0, 2])}, graph.parent)
    with pytest.raises(AssertionError):
        compare(swapped[0], theirs[0])
