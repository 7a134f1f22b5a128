"""Attention is fused where its mask is the contract's in every entry, and stays as it is under any other."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import onnx
import pytest
import torch
from trt_spec.engines import Bundle, blank_step, open_engine
from trt_spec.engines.torch import engine, fusing
from trt_spec.engines.torch.conversion import fold
from trt_spec.engines.torch.fusing import Rewriting
from trt_spec.engines.torch.kernels import attention
from trt_spec.engines.torch.onnx_graph import Node, read_graph
from trt_spec.export.checking.scenarios import TREE, Script

from ...kit import mask_faults
from ...kit.bundles import Pair
from ...kit.steps import model_of
from ..parity import assert_engine_agrees


def rewriting_of(pair: Pair, file: Path | None = None) -> Rewriting:
    bundle = Bundle.open(pair.bundle)
    return Rewriting(*fold(read_graph(file or bundle.graph("target"))), bundle.target.contract, "cuda")


def fused(graph: Rewriting) -> list[Node]:
    assert fusing.attention.fuse(graph) == len(list(graph.all("trt_spec::Attention")))
    return list(graph.all("trt_spec::Attention"))


@pytest.mark.parametrize(
    ("family", "attributes"),
    [
        ("llama", [{"window": 0}] * 2),
        ("gpt2", [{"window": 0}] * 2),
        ("gemma2", [{"window": 8, "softcap": 3.0}, {"window": 0, "softcap": 3.0}]),
    ],
)
def test_windows_and_caps_are_those_of_the_model(pairs, family: str, attributes: list[dict[str, float]]) -> None:
    found = fused(rewriting_of(pairs(family)))
    assert [{name: value for name, value in node.attributes.items() if name != "scale"} for node in found] == attributes


def test_no_mask_is_left_and_each_cache_is_written_before_it_is_read(pairs) -> None:
    graph = rewriting_of(pairs("gemma2"))
    assert "ScatterElements" in {node.op for node in graph.in_order()}
    fused(graph)
    nodes = graph.in_order()
    assert not {node.op for node in nodes} & {"ScatterElements", "And", "Attention"}
    written: set[str] = set()
    for node in nodes:
        assert node.op != "trt_spec::Attention" or written.issuperset(node.inputs[1:3])
        written |= set(node.outputs) if node.op == "TensorScatter" else set()


@pytest.fixture
def spoilt(pairs, tmp_path: Path) -> Callable[[Callable[[Any], None]], Rewriting]:
    """`spoilt(fault)`: the graph of Gemma 2, whose first layer alone has a window, with a fault in its masks."""

    def spoil(fault: Callable[[Any], None]) -> Rewriting:
        file = Bundle.open(pairs("gemma2").bundle).graph("target")
        model = onnx.load(file, load_external_data=False)
        fault(model)
        onnx.save(model, tmp_path / file.name)
        shutil.copy(file.with_name("weights.bin"), tmp_path)
        return rewriting_of(pairs("gemma2"), tmp_path / file.name)

    return spoil


@pytest.mark.parametrize(
    ("fault", "sound"),
    [
        (mask_faults.see_one_row_too_many, 0),
        (mask_faults.mask_as_if_every_call_were_the_first, 0),
        (mask_faults.see_what_is_as_deep, 0),
        (mask_faults.see_all_before_in_the_call, 0),
        (mask_faults.see_all_of_a_tail, 0),
        (mask_faults.measure_the_window_by_columns, 1),
        (mask_faults.take_columns_for_positions, 1),
        (mask_faults.take_columns_for_positions_in_a_tail, 1),
    ],
)
def test_attention_under_another_mask_stays_as_it_is(spoilt, fault: Callable[[Any], None], sound: int) -> None:
    assert len(fused(spoilt(fault))) == sound


@pytest.mark.parametrize("window", [1, 200])
def test_a_window_is_as_long_as_the_graph_makes_it(spoilt, window: int) -> None:
    def lengthen(model: Any) -> None:
        [weight] = [one for one in model.graph.initializer if one.name == mask_faults.window(model).input[1]]
        weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * 0 + window, weight.name))

    assert [node.attributes["window"] for node in fused(spoilt(lengthen))] == [window, 0]


def test_a_call_of_many_tokens_has_the_logits_of_attention_that_is_not_fused(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle, logits = Bundle.open(llama.bundle), []
    plain = open_engine("torch", bundle.graph("target"), bundle.target.contract)
    monkeypatch.setattr(engine, "WITH_KERNELS", ("cpu", "cuda"))
    ours = open_engine("torch", bundle.graph("target"), bundle.target.contract)
    assert attention.MOST_TOKENS < 70
    for each in (plain, ours):
        model = model_of(each, 1, capacity=100)
        step = blank_step(each, model.cache.buffers, 0, 1, 70, 70)
        step.input_ids.copy_(torch.arange(70) % 60)
        step.run()
        logits.append(step.logits)
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let the operator run its kernels on the CPU; returns how many tokens each call had."""
    from trt_spec.engines.torch.kernels.on_gpu import attention as kernels

    widths = []

    def run(query: Any, *others: Any) -> Any:
        widths.append(query.shape[2])
        return kernels.attention(query, *others)

    monkeypatch.setattr(attention, "_composition", run)
    return widths


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs where there is no GPU")
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_the_kernels_in_the_engine_give_the_logits_of_onnxruntime(pairs, interpreted: list[int], family: str) -> None:
    def write(vocab: int, max_length: int, recurrent: bool, tails: bool) -> Script:
        script = Script(vocab, max_length, Random(1))
        script.call("prefill", 0, 12, [12])
        script.call("prefill", 1, 9, [9, 4, 1])
        script.tree(TREE, 1, 7, [7, 5, 6])
        return script

    assert_engine_agrees(pairs(family).bundle, write=write)
    assert set(interpreted) >= {7, 9, 12}


@pytest.mark.parametrize(("family", "expected"), [("llama", True), ("gemma2", True), ("latents", False)])
def test_rounds_need_no_buckets_where_the_kernel_alone_reads_the_cache(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, family: str, expected: bool
) -> None:
    """Latents of 576 numbers, and whatever is not fused, are read by torch's operations in full."""
    pairs, latents = request.getfixturevalue("pairs"), request.getfixturevalue("latents")
    bundle = Bundle.open(latents.bundle if family == "latents" else pairs(family).bundle)
    assert not open_engine("torch", bundle.graph("target"), bundle.target.contract).reads_live
    monkeypatch.setattr(engine, "WITH_KERNELS", ("cpu", "cuda"))
    if family == "latents":
        monkeypatch.setattr(fusing.attention, "MOST_NUMBERS", 8)
    assert open_engine("torch", bundle.graph("target"), bundle.target.contract).reads_live == expected
