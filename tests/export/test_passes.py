"""Each rewrite fires where it should, nowhere else, and leaves the numbers alone."""

from dataclasses import replace
from importlib import import_module
from inspect import signature
from itertools import chain
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from trt_spec.engines import Contract, blank_cache, blank_step, open_engine
from trt_spec.export import passes
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.passes.blocks import Blocks
from trt_spec.export.passes.fuse_norms import fuse_norms
from trt_spec.export.passes.fuse_rotary import fuse_rotary
from trt_spec.export.passes.merge_projections import merge_projections
from trt_spec.export.passes.orient_weights import orient_weights
from trt_spec.export.passes.quantise import Quantisation, quantise, to_blocks
from trt_spec.export.passes.share_table import share_table
from trt_spec.export.passes.simplify import simplify
from trt_spec.export.passes.spell_fp4 import spell_fp4
from trt_spec.export.passes.unround import unround
from trt_spec.export.passes.widen import widen
from trt_spec.export.plans.compiler import REWRITES
from trt_spec.export.writing.graph import LAST, OF_ONNX_RUNTIME, STORED, UNQUANTISED, trace
from trt_spec.export.writing.quiet import quiet_libraries

from ..kit.models import YARN, tiny_llama
from ..kit.traces import traced_once

ROTATION = """
<ir_version: 10, opset_import: ["" : 24]>
rotation (float[1, 2, S, 8] x, float[1, S, 4] f, float[1, S, 4] g) => (float[1, 2, S, 8] y)
<int64[1] zero = {0}, int64[1] half = {4}, int64[1] end = {9223372036854775807},
 int64[1] last = {3}, int64[1] one = {1}>
{
    angles = Concat <axis: int = -1> (f, OTHER)
    cos = Cos (angles)
    sin = Sin (angles)
    cos4 = Unsqueeze (cos, one)
    sin4 = Unsqueeze (sin, one)
    first = Slice (x, zero, half, last, one)
    second = Slice (x, half, end, last, one)
    minus = Neg (second)
    rotated = Concat <axis: int = -1> (minus, first)
    left = Mul (x, cos4)
    right = Mul (rotated, sin4)
    y = Add (left, right)
}
"""


def test_every_rewrite_is_a_file_and_a_row_of_a_table() -> None:
    rows = {*UNQUANTISED, *LAST, *OF_ONNX_RUNTIME, *REWRITES, *chain(*STORED.values())}
    found = set()
    for file in Path(passes.__path__[0]).glob("*.py"):
        rewrite = getattr(import_module(f"{passes.__name__}.{file.stem}"), file.stem, None)
        if callable(rewrite) and list(signature(rewrite).parameters) == ["model"]:
            found.add(rewrite)
    assert found - {widen, spell_fp4, unround} == rows, "those three make the copies that are checked"


def logits(graph: ir.Model, contract: Contract, folder: Path) -> torch.Tensor:
    """What the graph computes for two rows in two calls."""
    folder.mkdir()
    ir.save(graph, folder / "model.onnx", external_data="weights.bin", size_threshold_bytes=64)
    engine = open_engine("onnxruntime", folder / "model.onnx", contract)
    cache = blank_cache(contract, 2, 16)
    found = []
    for start in (0, 5):
        step = blank_step(engine, cache, 0, 2, 5, 5)
        step.input_ids.copy_(torch.arange(10).view(2, 5) + start)
        step.start.fill_(start)
        step.run()
        found.append(step.logits.clone())
    return torch.cat(found)


def test_each_rewrite_fires_as_often_as_its_pattern_occurs_and_keeps_the_numbers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(
        tiny_llama(tmp_path / "checkpoint", num_hidden_layers=1, tie_word_embeddings=True, rope_parameters=YARN)
    )
    contract = checkpoint.shape.contract(64, "float32")
    with quiet_libraries():
        graph = trace(load_model(checkpoint, "float32"), contract, checkpoint.shape.positions)
    expected = logits(graph, contract, tmp_path / "traced")
    rewrites: list[tuple[Any, int]] = [
        (orient_weights, 8),
        (simplify, 150),
        (fuse_norms, 3),
        (fuse_rotary, 2),
        (merge_projections, 2),
        (share_table, 1),
    ]
    for rewrite, times in rewrites:
        fired = rewrite(graph)
        assert fired >= times if rewrite is simplify else fired == times, rewrite.__name__
        found = logits(graph, contract, tmp_path / rewrite.__name__)
        assert (found - expected).abs().max() < 1e-5, rewrite.__name__  # rounding of one layer
        assert rewrite(graph) == 0 or rewrite is simplify, f"{rewrite.__name__} fired twice"


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize("biased", [False, True])
def test_queries_keys_and_values_become_one_product_of_the_same_bits(tmp_path: Path, kind: str, biased: bool) -> None:
    checkpoint = open_checkpoint(tiny_llama(tmp_path / "checkpoint", num_hidden_layers=1, attention_bias=biased))
    contract = checkpoint.shape.contract(64, "float32")
    with quiet_libraries():
        graph = traced_once(load_model(checkpoint, "float32"), contract, checkpoint.shape.positions)
    orient_weights(graph)
    simplify(graph)
    quantise(graph, Quantisation(kind))
    expected = logits(graph, contract, tmp_path / "apart")
    assert merge_projections(graph) == 2
    assert torch.equal(logits(graph, contract, tmp_path / "merged"), expected)
    products = [node for node in ir.load(tmp_path / "merged" / "model.onnx").graph if node.op_type == "MatMul"]
    assert len(products) == 6  # with those of the output, the gate, up, down and the head
    assert merge_projections(graph) == 0


def test_a_matrix_with_zero_points_stays_apart_from_those_without(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_llama(tmp_path / "checkpoint", num_hidden_layers=1))
    contract = checkpoint.shape.contract(64, "float32")
    model = load_model(checkpoint, "float32")

    def known(name: str, kind: str, dtype: torch.dtype) -> Blocks | None:
        if "q_proj" not in name:
            return None
        [weight] = [one for own, one in model.named_parameters() if "q_proj.weight" in own]
        blocks = to_blocks(weight.detach().T, kind, 32)
        return replace(blocks, zeros=torch.ones_like(blocks.scales, dtype=torch.int8))

    with quiet_libraries():
        graph = traced_once(model, contract, checkpoint.shape.positions)
    orient_weights(graph)
    simplify(graph)
    quantise(graph, Quantisation("int4"), known)
    expected = logits(graph, contract, tmp_path / "apart")
    assert merge_projections(graph) == 1, "keys and values alone"
    assert torch.equal(logits(graph, contract, tmp_path / "merged"), expected)


@pytest.mark.parametrize("threshold", [0, 2**20])
def test_numbers_of_four_bits_are_spelled_as_whole_ones_that_mean_the_same(tmp_path: Path, threshold: int) -> None:
    """In a file of their own, or in the graph."""
    every = (np.arange(32 * 3) % 16).astype(np.uint8).reshape(32, 3).view(ml_dtypes.float4_e2m1fn)
    scales = np.array([[0.25, 1, 3], [2, 0.3, 448]], np.float32)
    stored = [ir.val(name, const_value=ir.tensor(one, name=name)) for name, one in (("w", every), ("s", scales))]
    widen = ir.node("DequantizeLinear", stored, {"axis": 0, "block_size": 16}, name="widen")
    wide = widen.outputs[0]
    wide.name, wide.shape, wide.type = "wide", ir.Shape([32, 3]), ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([], [wide], nodes=[widen], initializers=stored, opset_imports={"": 24}, name="widening")
    ir.save(ir.Model(graph, ir_version=11), tmp_path / "a.onnx", external_data="w.bin", size_threshold_bytes=threshold)
    model = ir.load(tmp_path / "a.onnx")
    assert spell_fp4(model) == 1
    ir.save(model, tmp_path / "b.onnx")
    [found] = onnxruntime.InferenceSession(tmp_path / "b.onnx").run(None, {})
    assert np.array_equal(found, every.astype(np.float32) * scales.repeat(16, 0))
    assert spell_fp4(model) == 0


PRODUCTS = """
<ir_version: 10, opset_import: ["" : 24]>
products (float[S, 4] x, float[S, 2] other) => (float[S, 2, 1] a, float[S, 2, 1] b, float[4, 2] c)
<float[4, 2] one = {1, 2, 3, 4, 5, 6, 7, 8}, float[4, 2] two = {8, 7, 6, 5, 4, 3, 2, 1}, float[2] bias = {1, 2},
 float[2] second = {3, 4}, int64[3] heads = {-1, 2, 1}>
{
    p = MatMul (x, one)
    p1 = Add (p, bias)
    a = Reshape (p1, heads)
    q = MatMul (x, two)
    q1 = Add (q, ADDED)
    b = Reshape (q1, heads)
    c = Identity (READ)
}
"""


@pytest.mark.parametrize(
    ("added", "read", "times"),
    [("second", "bias", 0), ("second", "two", 0), ("bias", "x", 0), ("other", "x", 0), ("second", "x", 1)],
)
def test_matrices_that_are_not_alike_or_are_read_elsewhere_stay_apart(added: str, read: str, times: int) -> None:
    graph = ir.from_proto(onnx.parser.parse_model(PRODUCTS.replace("ADDED", added).replace("READ", read)))
    assert merge_projections(graph) == times
    assert sum(node.op_type == "MatMul" for node in graph.graph) == 2 - times


def test_a_tied_head_multiplies_by_the_table_in_which_tokens_are_looked_up(graphs) -> None:
    weights = ir.load(graphs("gpt2").file).graph.initializers
    assert sorted(use.node.op_type for use in weights["transformer.wte.weight"].uses()) == ["Gather", "Gemm"]
    assert "transformer.wte.weight.T" not in weights


@pytest.mark.parametrize(("other", "times"), [("f", 1), ("g", 0)])
def test_rotation_is_fused_only_when_both_halves_turn_by_the_same_angle(other: str, times: int) -> None:
    graph = ir.from_proto(onnx.parser.parse_model(ROTATION.replace("OTHER", other)))
    assert fuse_rotary(graph) == times
    assert sum(node.op_type == "RotaryEmbedding" for node in graph.graph) == times


def test_widened_graph_keeps_its_narrow_weights_and_casts_them_where_they_are_used() -> None:
    table = ir.Value(name="table", const_value=ir.tensor(torch.ones(8, 4, dtype=torch.float16).numpy(), name="table"))
    table.dtype, table.shape = ir.DataType.FLOAT16, ir.Shape([8, 4])
    ids = ir.Value(name="ids", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["n"]))
    rows = ir.node("Gather", [table, ids])
    turned = ir.node("Transpose", [table], {"perm": [1, 0]})
    product = ir.node("MatMul", [rows.outputs[0], turned.outputs[0]])
    for node in (rows, turned, product):
        node.outputs[0].dtype = ir.DataType.FLOAT16
    steps = [rows, turned, product]
    graph = ir.Graph([ids], product.outputs, nodes=steps, initializers=[table], opset_imports={"": 24})
    assert widen(ir.Model(graph, ir_version=10)) == 1
    assert table.dtype == ir.DataType.FLOAT16
    assert rows.inputs[0] is table  # the rows are cast, not the table
    assert graph.outputs[0].dtype == ir.DataType.FLOAT
    assert [node.op_type for node in graph] == ["Cast", "Gather", "Cast", "Transpose", "MatMul"]
    assert "table" in [value.name for value in graph.inputs]  # no constant: engines must not fold the cast
