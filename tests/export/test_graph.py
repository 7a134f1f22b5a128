"""The exported graphs: what they promise, what they must not contain, and that they compute what checkpoints do."""

from collections import Counter

import onnx_ir as ir
import pytest
import torch
from trt_spec.engines import blank_cache, blank_step, open_engine
from trt_spec.export.checking.check import check_graph
from trt_spec.export.checkpoints.checkpoint import load_model, open_checkpoint
from trt_spec.export.writing.graph import SMALLEST_EXTERNAL

FAMILIES = ("llama", "gpt2", "gemma2")
ROUNDING = 5e-5  # float32 through two layers, on logits with a standard deviation of about 2

pytestmark = pytest.mark.parametrize("family", FAMILIES)


def test_graph_equals_its_checkpoint_in_every_scenario(graphs, family: str) -> None:
    graph = graphs(family)
    report, _ = check_graph(graph.file, graph.contract, graph.reference)
    assert set(report["errors"]) == {
        "chunked prefill",
        "single steps",
        "verify width",
        "rollback",
        "ragged batch",
        "tree",
        "tail",
        "deep cache",
        "deep tree",
    }
    assert report["worst_error"] < ROUNDING
    assert not report["as_float32_copy"]


def test_every_position_up_to_the_last_one_equals_the_checkpoint(graphs, family: str) -> None:
    """Chunks of 13, the last one padded beyond the positions; Gemma2's window of 8 slides all along."""
    graph = graphs(family)
    length, width = graph.contract.max_length, 13
    tokens = torch.randint(64, (1, length), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = load_model(open_checkpoint(graph.checkpoint), "float32")(tokens).logits[0]
    engine = open_engine("onnxruntime", graph.file, graph.contract)
    cache = blank_cache(graph.contract, 1, length + width)
    for start in range(0, length, width):
        chunk = tokens[:, start : start + width]
        step = blank_step(engine, cache, 0, 1, width, width)
        step.input_ids.zero_()
        step.input_ids[:, : chunk.shape[1]] = chunk
        step.start.fill_(start)
        step.run()
        error = (step.logits[0, : chunk.shape[1]] - expected[start : start + width]).abs().max()
        assert error < ROUNDING, f"row {start} on"


def test_attention_is_never_causal_and_always_masked(graphs, family: str) -> None:
    attention = [node for node in ir.load(graphs(family).file).graph if node.op_type == "Attention"]
    assert len(attention) == 2
    for node in attention:
        assert node.attributes.get_int("is_causal") == 0
        assert node.inputs[3].dtype == ir.DataType.BOOL
        assert len(node.inputs) == 4  # the lengths that TensorRT drops without a word are not used


def test_no_weight_is_transposed_when_the_graph_runs(graphs, family: str) -> None:
    graph = ir.load(graphs(family).file).graph
    turned = [node for node in graph if node.op_type == "Transpose" and node.inputs[0].is_initializer()]
    assert turned == []
    products = [node for node in graph if node.op_type == "MatMul" and node.inputs[1].is_initializer()]
    assert len(products) == {"llama": 11, "gpt2": 8, "gemma2": 11}[family]
    tied = [node for node in graph if node.op_type == "Gemm"]  # which reads a matrix either way
    assert len(tied) == {"llama": 0, "gpt2": 1, "gemma2": 0}[family]


def test_every_cache_output_is_the_one_update_of_its_input(graphs, family: str) -> None:
    """What engines need to write in place: no other node reads the old buffer."""
    made = graphs(family)
    graph = ir.load(made.file).graph
    inputs = {value.name: value for value in graph.inputs}
    outputs = {value.name: value for value in graph.outputs}
    assert len(made.contract.aliases) == 4
    for present, past in made.contract.aliases.items():
        update = outputs[present].producer()
        assert update.op_type == "TensorScatter"
        assert update.inputs[0] is inputs[past]
        assert [use.node for use in inputs[past].uses() if use.node.op_type != "Shape"] == [update]


def test_norms_and_rotations_are_single_nodes(graphs, family: str) -> None:
    found = Counter(node.op_type for node in ir.load(graphs(family).file).graph)
    expected = {
        "llama": {"RMSNormalization": 5, "RotaryEmbedding": 4, "LayerNormalization": 0},
        "gpt2": {"RMSNormalization": 0, "RotaryEmbedding": 0, "LayerNormalization": 5},
        "gemma2": {"RMSNormalization": 9, "RotaryEmbedding": 4, "LayerNormalization": 0},
    }[family]
    assert {name: found[name] for name in expected} == expected
    assert (found["Gelu"], found["Pow"]) == ({"llama": 0}.get(family, 2), 0)


def test_weights_lie_in_one_file_beside_a_small_graph(graphs, family: str) -> None:
    made = graphs(family)
    assert sorted(file.name for file in made.folder.iterdir()) == ["model.onnx", "weights.bin"]
    for value in ir.load(made.file).graph.initializers.values():
        tensor = value.const_value
        if tensor.nbytes > SMALLEST_EXTERNAL:
            assert isinstance(tensor, ir.ExternalTensor)
            assert tensor.location == "weights.bin"


def test_graph_names_its_dimensions_as_the_contract_does(graphs, family: str) -> None:
    made = graphs(family)
    graph = ir.load(made.file).graph
    for specs, values in ((made.contract.inputs, graph.inputs), (made.contract.outputs, graph.outputs)):
        assert [spec.name for spec in specs] == [value.name for value in values]
        for spec, value in zip(specs, values, strict=True):
            assert tuple(dim if isinstance(dim, int) else dim.value for dim in value.shape) == spec.shape
