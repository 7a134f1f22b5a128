"""A graph with room for adapters computes them, and a row without one has the bits of the graph alone."""

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from transformers import AutoModelForCausalLM
from trt_spec.engines import Adapters, ExportError
from trt_spec.engines.bundle import ADAPTED, FUSED, GRAPH
from trt_spec.export import export_bundle
from trt_spec.export.checking import check_adapters as checking
from trt_spec.export.passes.adapt import adapt, adaptable, linear_modules
from trt_spec.export.passes.quantise import Quantisation

from ..kit.families import tiny_checkpoint
from ..kit.models import tiny_llama
from ..kit.source_models import tiny_with_source

ATTENTION, GATED = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]


def exported(checkpoint: Path, out: Path, **options: object):
    [target] = export_bundle(checkpoint, out, adapters=2, adapter_rank=4, **options).models
    return target.entry


def test_beside_every_product_of_a_layer_there_is_room(tmp_path: Path) -> None:
    entry = exported(tiny_llama(tmp_path / "llama"), tmp_path / "bundle")
    room = entry.contract.adapters
    assert (room.most, room.rank) == (2, 4)
    assert {one.name.rpartition(".")[2] for one in room.products} == {*ATTENTION, *GATED}
    assert len(room.products) == 14
    assert entry.check["adapters"]["same_bits"]
    assert 0 < entry.check["adapters"]["worst_error"] < 1e-4
    assert (tmp_path / "bundle/target" / f"{ADAPTED}{GRAPH}").exists()


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("falcon", {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}),
        ("gpt2", {"c_attn", "c_proj", "c_fc"}),
        ("llama4_text", {*ATTENTION, *GATED}),  # no router
    ],
)
def test_linear_layers_of_every_class_are_found(tmp_path: Path, kind: str, names: set[str]) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(kind, tmp_path / "checkpoint"))
    assert {name.rpartition(".")[2] for name in linear_modules(model)} == names


def test_layers_that_share_a_matrix_have_no_room(tmp_path: Path) -> None:
    """Adapters are of one of them, and the graph does not say which of them runs."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint("zamba2", tmp_path / "checkpoint"))
    blocks = {name.split(".")[2] for name in linear_modules(model) if ".shared_transformer." in name}
    assert blocks == {"2"}, "layers 0 and 3 have one block"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind", ["gpt2", "opt", "gemma2", "deepseek_v3", "bamba", "lfm2", "qwen3_moe", "codegen", "falcon", "zamba2"]
)
def test_in_other_families(tmp_path: Path, kind: str) -> None:
    """With biases, MLA, recurrent layers, experts, layers of one matrix, and products of tokens in one row."""
    entry = exported(tiny_checkpoint(kind, tmp_path / "checkpoint"), tmp_path / "bundle")
    assert len(entry.contract.adapters.products) >= 8
    assert entry.check["adapters"]["worst_error"] < entry.check["tolerance"]
    assert (tmp_path / "bundle/target" / FUSED).exists() == (tmp_path / f"bundle/target/{ADAPTED}{FUSED}").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_where_weights_are_narrow(tmp_path: Path, weights: str, dtype: str) -> None:
    own = tiny_llama(tmp_path / "llama")
    entry = exported(own, tmp_path / "bundle", weights=Quantisation(weights), dtype=dtype)
    assert entry.check["adapters"]["same_bits"]
    assert len(entry.contract.adapters.products) == 14


@pytest.mark.exhaustive
def test_behind_a_source(tmp_path: Path) -> None:
    entry = exported(tiny_with_source("t5", tmp_path / "t5"), tmp_path / "bundle")
    assert len(entry.contract.adapters.products) > 8


def test_products_in_other_types_than_the_graph_have_room_in_their_own() -> None:
    """As gates of experts in float32, and terms of exact sums."""
    kinds = (ir.DataType.FLOAT, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)
    read = ir.Value(name="read", shape=ir.Shape(("batch", "width", 4)), type=ir.TensorType(kinds[1]))
    nodes, weights, given = [], [], []
    for kind in kinds:
        weight = ir.Tensor(np.ones((4, 3), kind.numpy()), dtype=kind, name=f"{kind.name}.weight.T")
        weights.append(ir.Value(name=weight.name, shape=weight.shape, type=ir.TensorType(kind), const_value=weight))
        cast = ir.node("Cast", [read], {"to": int(kind)})
        product = ir.node("MatMul", [cast.outputs[0], weights[-1]])
        last = ir.node("Identity", product.outputs)
        nodes += [cast, product, last]
        for node, width in ((cast, 4), (product, 3), (last, 3)):
            node.outputs[0].name, node.outputs[0].type = f"{node.op_type}.{kind.name}", ir.TensorType(kind)
            node.outputs[0].shape = ir.Shape(("batch", "width", width))
        given += last.outputs
    graph = ir.Graph([read], given, nodes=nodes, initializers=weights, opset_imports={"": 23}, name="mixed")
    model = ir.Model(graph, ir_version=11)
    room = Adapters(2, 1, adaptable(model, {kind.name: (4, 3) for kind in kinds}))
    assert adapt(model, room) == len(kinds)
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert {value.dtype for value in graph.inputs if value.name in room.names} == {ir.DataType.BFLOAT16}


def test_an_adapter_of_other_rows_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: rows have each other's."""
    run = checking._run

    def swapped(*given: object):
        found = run(*given)
        return found[[0, 2, 1]]

    monkeypatch.setattr(checking, "_run", swapped)
    with pytest.raises(ExportError, match="the target graph does not compute its adapters: a logit is off by"):
        exported(tiny_llama(tmp_path / "llama"), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_a_model_without_linear_layers_has_no_room() -> None:
    with pytest.raises(ExportError, match="has no linear layer that adapters could be beside"):
        adaptable(ir.Model(ir.Graph([], [], nodes=[]), ir_version=10), {})
