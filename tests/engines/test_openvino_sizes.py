"""Frequent numbers of tokens get an OpenVINO model each, within bounds, and it computes the same bits."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import pytest
import torch
from openvino import opset15 as ops
from torch import Tensor
from trt_spec.engines import Bundle, open_engine
from trt_spec.engines.openvino import OpenVinoEngine, core, sizes
from trt_spec.export.passes.quantise import Quantisation
from trt_spec.runtime import Decoder, SamplingParams

from ..kit.bundles import Pair, export_pair
from ..kit.models import tiny_llama
from ..kit.openvino_steps import Cache, opened

ENOUGH = 4


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "ENOUGH_CALLS", ENOUGH)


@pytest.fixture
def engine(llama: Pair) -> Iterator[OpenVinoEngine]:
    made = opened(llama.bundle)
    assert isinstance(made, OpenVinoEngine)
    yield made
    made.close()


def allow(engine: OpenVinoEngine, models: int) -> None:
    engine.fixed._most = models


def call(cache: Cache, width: int, times: int = ENOUGH) -> Tensor:
    """Call so often, and wait for what is compiled beside the calls."""
    for _ in range(times):
        [logits] = cache.logits([width])
    for found in cache.engine.fixed._models.values():
        found.exception()
    return logits


IN_BFLOAT16 = pytest.param(
    "bfloat16",
    marks=pytest.mark.skipif(
        "BF16" not in core(openvino).get_property("CPU", "OPTIMIZATION_CAPABILITIES"),
        reason="no bfloat16 in this processor",
    ),
)


@pytest.mark.parametrize("kind", ["float32", "int8", "int8 exact", "int4", IN_BFLOAT16])
def test_a_model_for_one_number_of_tokens_gives_the_bits_of_the_one_for_any(tmp_path: Path, kind: str):
    """Also with fewer tokens than its number, several rows, and rows that propose nothing."""
    checkpoint = tiny_llama(tmp_path / "checkpoint", hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    options = {"weights": Quantisation(kind.split()[0])} if kind.startswith("int") else {}
    bundle = Bundle.open(export_pair(checkpoint, tmp_path / "bundle", **options).bundle)
    name, graph = "openvino-bfloat16" if kind == "bfloat16" else "openvino", bundle.graph("target")
    fixed, free = (
        open_engine(name, graph, bundle.target.contract, exact_weights=kind == "int8 exact") for _ in range(2)
    )
    allow(free, 0)
    caches = Cache(fixed, 4), Cache(free, 4)
    for widths in ([1], [5], [5, 4], [5, 5, 0, 1], [17], [17, 3, 9, 6], [1] * 4):
        for _ in range(ENOUGH):
            found, expected = (torch.cat(cache.logits(widths)) for cache in caches)
            fixed.settle()
            free._size = 0  # it runs no padding
        assert torch.equal(found, expected)
        for name in fixed.contract.cache_names:
            assert torch.equal(caches[0].memory[name][1:], caches[1].memory[name][1:])
    assert fixed.fixed.sizes == [1, 4, 5, 12, 20, 36] or not torch.cpu._is_vnni_supported()
    assert free.fixed.sizes == []
    fixed.close()
    free.close()


def test_calls_go_on_while_a_model_is_compiled(engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch):
    may_go_on, compile_model = threading.Event(), engine.fixed._compile

    def compile_later(model: Any) -> Any:
        assert may_go_on.wait(30)
        return compile_model(model)

    monkeypatch.setattr(engine.fixed, "_compile", compile_later)
    cache = Cache(engine, 1)
    for _ in range(2 * ENOUGH):
        cache.logits([2])
    assert engine.fixed.sizes == []
    may_go_on.set()
    call(cache, 2)
    assert engine.fixed.sizes == [2]


def test_rare_numbers_get_none_but_a_few_more_tokens_do_not_matter(engine: OpenVinoEngine):
    cache = Cache(engine, 1)
    call(cache, 5, ENOUGH - 1)
    assert engine.fixed.sizes == []
    call(cache, 5, 1)
    assert engine.fixed.sizes == [5]
    assert [getattr(engine.fixed.find(tokens), "tokens", None) for tokens in (1, 2, 5, 6)] == [None, 5, 5, None]


def test_a_single_token_is_never_padded(engine: OpenVinoEngine):
    """With some weights it has a kernel of its own, and then its text would depend on what is ready."""
    call(Cache(engine, 1), 2)
    assert engine.fixed.sizes == [2]
    assert engine.fixed.find(1) is None


def test_settling_compiles_at_once_for_what_calls_had(engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sizes, "SOME_CALLS", 2)
    cache = Cache(engine, 1)
    call(cache, 3, 2)
    call(cache, 4, 1)
    engine.settle()
    assert engine.fixed.sizes == [3]


def test_all_weights_together_have_a_bound(llama: Pair, engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch):
    weights = sum(one.get_byte_size() for one in engine.fixed._model.get_ops() if one.get_type_name() == "Constant")
    assert weights > 1e4
    for models, expected in ((3, 3), (2, 2), (1, 0)):  # for a single one it is never worth it
        monkeypatch.setattr(sizes, "MOST_BYTES", models * weights + 1)
        bounded = opened(llama.bundle)
        cache = Cache(bounded, 1)
        for width in range(1, 6):
            call(cache, width)
        assert len(bounded.fixed.sizes) == expected
        bounded.close()


def test_the_model_used_least_gives_way_to_one_that_is_wanted_twice_as_often(engine: OpenVinoEngine):
    allow(engine, 2)
    cache = Cache(engine, 1)
    call(cache, 1, 3 * ENOUGH)
    call(cache, 5, 2 * ENOUGH)
    call(cache, 9, ENOUGH)
    assert engine.fixed.sizes == [1, 5]
    for _ in range(6 * ENOUGH):
        call(cache, 1, 1)
        call(cache, 9, 1)
    assert engine.fixed.sizes == [1, 12]


def test_a_model_with_other_bits_is_given_up_and_changes_nothing(
    engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch
):
    compile_model = engine.fixed._compile

    def compile_something_else(model: Any) -> Any:
        [result] = model.get_results()
        result.input(0).replace_source_output(ops.multiply(result.input_value(0), np.float32(1 + 1e-6)).output(0))
        return compile_model(model)

    monkeypatch.setattr(engine.fixed, "_compile", compile_something_else)
    cache = Cache(engine, 1)
    [expected] = cache.logits([5])
    call(cache, 5, ENOUGH - 1)
    assert engine.fixed.sizes == [5]
    assert torch.equal(call(cache, 5, 1), expected)
    assert engine.fixed.sizes == []
    assert torch.equal(call(cache, 5, 2 * ENOUGH), expected)
    assert engine.fixed.sizes == []


def test_a_model_that_cannot_be_compiled_is_done_without(engine: OpenVinoEngine, monkeypatch: pytest.MonkeyPatch):
    def fail(model: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(engine.fixed, "_compile", fail)
    cache = Cache(engine, 1)
    [expected] = cache.logits([5])
    assert torch.equal(call(cache, 5, 3 * ENOUGH), expected)
    engine.settle()
    [found] = Cache(engine, 1).logits([5])  # in another cache
    assert torch.equal(found, expected)
    assert engine.fixed.sizes == []


def test_closing_waits_for_what_is_compiled_and_frees_it(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    made, compile_model = opened(llama.bundle), core(openvino).compile_model
    began, ended = threading.Event(), threading.Event()

    def compile_slowly(model: Any) -> Any:
        began.set()
        time.sleep(0.1)
        ended.set()
        return compile_model(model, "CPU")

    monkeypatch.setattr(made.fixed, "_compile", compile_slowly)
    cache = Cache(made, 1)
    for _ in range(ENOUGH):
        cache.logits([5])
    assert began.wait(30)
    made.close()
    assert ended.is_set()
    assert made.fixed.sizes == []
    made.settle()
    assert made.fixed.sizes == []


def test_texts_stay_as_they_are_when_a_decoder_settles(llama: Pair):
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompts = [[5, 9, 17], [7, 8] * 20]
    with Decoder.open(llama.bundle) as decoder:
        expected = [one.token_ids for one in decoder.generate(prompts, params, draft_length=0)]
    with Decoder.open(llama.bundle, "openvino", max_batch=2) as decoder:
        for k in (0, 4, 0, 4):
            assert [one.token_ids for one in decoder.generate(prompts, params, draft_length=k)] == expected
            decoder.settle()
        assert all(model.engine.fixed.sizes for model in (decoder.target, *decoder.drafts))
