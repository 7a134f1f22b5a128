"""TensorRT plans of shards: compiled for RTX, with TensorRT's own operator where shards sum and gather."""

from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from trt_spec.engines import EngineError, open_engines
from trt_spec.engines.tensorrt import PlanKey
from trt_spec.export.passes.spell_collectives import DOMAIN, spell_collectives
from trt_spec.export.plans.build import build_plans
from trt_spec.export.plans.compiler import prepare
from trt_spec.export.plans.roles import BuildOptions

from ...kit.bundles import export_pair
from ...kit.models import tiny_llama
from ...kit.shards import in_shards


@pytest.mark.usefixtures("compiled_here")
def test_each_shard_of_a_target_has_plans_of_its_own(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target", num_hidden_layers=1)
    whole = export_pair(target, tmp_path / "whole", max_length=64, dtype="float16").bundle
    in_shards(whole, tmp_path / "bundle", 2, exact=False)
    options = BuildOptions("tensorrt-rtx", ["8.9"], (1, 4), 3, prefill_width=0, unfused_attention=True)
    report = build_plans(tmp_path / "bundle", options)
    first, second = report.plans
    contract = report.bundle.target.contract
    assert [(plan.role, plan.key.shard) for plan in report.plans] == [("verify", 0), ("verify, shard 1", 1)]
    assert first.key.graph != second.key.graph
    assert first.inputs == second.inputs == [str(spec) for spec in contract.inputs]
    assert build_plans(tmp_path / "bundle", options).built == 0
    with pytest.raises(EngineError, match=r"engine tensorrt runs no shards, .* is one of 2; use engine torch"):
        open_engines("tensorrt", [(report.bundle.graph("target"), contract)], "cuda")

    for plan in report.plans:
        model, fired = prepare(tmp_path / "bundle" / plan.key.folder / plan.key.file, plan.key)
        between = [node for node in model.graph if node.op_type == "DistCollective"]
        assert fired["spell_collectives"] == len(between) == 4, "embedding, attention, feed-forward part and logits"
        assert [one.attributes.get_string("collective_operation") for one in between] == [
            *["all_reduce"] * 3,
            "all_gather",
        ]
        assert not [node for node in model.graph if node.domain == DOMAIN]


def test_a_shard_without_a_plan_of_its_number_is_another(tmp_path: Path) -> None:
    sizes = (4, 4, (1, 4), 64)
    keys = [PlanKey("target", "", "tensorrt-rtx", "1", "8.9", *sizes, shard=shard) for shard in (0, 1)]
    assert [str(key.folder) for key in keys] == ["target", "target/shard1"]
    assert keys[0].path != keys[1].path


def test_parts_of_logits_that_are_gathered_along_the_first_axis_lie_side_by_side() -> None:
    """TensorRT's operator is replaced by what it does: it puts the parts of all shards one after another."""
    shards, shape = 3, (2, 4, 5)
    x, others = (
        ir.Value(name=name, shape=ir.Shape([size, 4, 5]), type=ir.TensorType(ir.DataType.FLOAT))
        for name, size in (("x", "batch"), ("others", "all"))
    )
    node = ir.node("AllGather", [x], {"shards": shards}, domain=DOMAIN)
    node.outputs[0].name, node.outputs[0].type = "logits", x.type
    graph = ir.Graph([x, others], node.outputs, nodes=[node], opset_imports={"": 24, DOMAIN: 1}, name="gathering")
    model = ir.Model(graph, ir_version=11)
    assert spell_collectives(model) == 1
    [found] = [node for node in model.graph if node.op_type == "DistCollective"]
    assert found.attributes.get_int("nb_rank") == shards
    joined = ir.node("Concat", [x, others], {"axis": 0}, name="joined")
    found.outputs[0].replace_all_uses_with(joined.outputs[0])
    model.graph.insert_before(found, joined)
    model.graph.remove(found, safe=True)
    parts = np.random.default_rng(0).standard_normal((shards, *shape), dtype=np.float32)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    [made] = session.run(None, {"x": parts[0], "others": np.concatenate(parts[1:])})
    np.testing.assert_array_equal(made, np.concatenate(parts, -1))
