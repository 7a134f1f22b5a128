"""The engine openvino computes what ONNX Runtime does, and for each token the same bits whatever is beside it."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor
from trt_spec.engines import (
    BLOCK_TOKENS,
    SPARE_BLOCK,
    Bundle,
    ContractError,
    Engine,
    EngineError,
    keys_and_values,
    open_engine,
)
from trt_spec.engines.openvino import NARROW, OpenVinoEngine
from trt_spec.engines.openvino.library import VERSION
from trt_spec.export.passes.quantise import Quantisation
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.model import Model

from ..kit.bundles import Pair, export_pair
from ..kit.families import tiny_checkpoint
from ..kit.mask_faults import (
    mask_as_if_every_call_were_the_first,
    measure_the_window_by_columns,
    nodes,
    see_all_before_in_the_call,
    see_one_row_too_many,
    see_what_is_as_deep,
)
from ..kit.models import tiny_gpt2, tiny_llama
from ..kit.openvino_steps import TOKENS, Cache, opened
from .parity import assert_engine_agrees


@pytest.fixture(scope="module", params=["float32", "int8", "int8 exact", "int4"])
def weights(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def bundle(weights: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model large enough for the kernels of real ones."""
    folder, kind = tmp_path_factory.mktemp("bundle"), weights.split()[0]
    checkpoint = tiny_llama(folder / "checkpoint", hidden_size=256, intermediate_size=512, num_hidden_layers=2)
    options = {} if kind == "float32" else {"weights": Quantisation(kind)}
    return export_pair(checkpoint, folder / "bundle", **options).bundle


@pytest.fixture(scope="module")
def engine(weights: str, bundle: Path) -> Iterator[Engine]:
    """Where weights are integers, activations are rounded too, but in "int8 exact"."""
    made = opened(bundle, exact_weights=weights == "int8 exact")
    yield made
    made.close()


@pytest.fixture(scope="module")
def allowed(weights: str, bundle: Path, engine: Engine) -> float:
    """How far the logits of a single token may be from those that it has beside others.

    It has another kernel with int4, and with int8 where activations are not rounded: not every processor can.
    """
    if weights == "float32":
        return 0.0
    exact = opened(bundle, exact_weights=True)
    rounds = not torch.equal(Cache(engine, 1).logits([2])[0], Cache(exact, 1).logits([2])[0])
    exact.close()
    if weights == "int8":
        assert rounds or not torch.cpu._is_vnni_supported()
    return 0.0 if weights.startswith("int8") and rounds else 2e-4


# What it computes.


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_logits_are_those_of_onnxruntime(pairs, family: str):
    """Over chunks, single steps, verify widths, rollbacks, ragged batches, with garbage where nothing was written."""
    assert_engine_agrees(pairs(family).bundle, "openvino")


@pytest.mark.parametrize("kind", ["mistral", pytest.param("gemma3_text", marks=pytest.mark.exhaustive)])
def test_a_window_is_kept_at_every_width(tmp_path: Path, kind: str):
    pair = export_pair(tiny_checkpoint(kind, tmp_path / "checkpoint"), tmp_path / "bundle")
    assert_engine_agrees(pair.bundle, "openvino")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights_are_the_numbers_they_stand_for(tmp_path: Path, kind: str):
    """Of the matrices, and of the rows that are looked up in a table of integers."""
    pair = export_pair(tiny_gpt2(tmp_path / "checkpoint"), tmp_path / "bundle", weights=Quantisation(kind))
    assert_engine_agrees(pair.bundle, "openvino")


def test_quantised_weights_stay_small_in_the_compiled_model(tmp_path: Path):
    """A product that reads them as float32 would be as slow as one with float32 weights."""
    pair = export_pair(tiny_llama(tmp_path / "checkpoint"), tmp_path / "bundle", weights=Quantisation("int8"))
    runtime = opened(pair.bundle)._any.model.get_runtime_model()
    products = [node for node in runtime.get_ops() if node.get_rt_info()["layerType"].astype(str) == "FullyConnected"]
    kinds = {node.input_value(1).get_element_type().to_string() for node in products}
    assert products
    assert kinds == {"i8"}


def test_each_node_of_a_deep_graph_is_looked_at_once():
    """The ways through it double with each residual connection, and nobody could follow all of them."""
    from openvino import opset15 as ops
    from trt_spec.engines.openvino.masks import reads

    node = ops.parameter([-1], name="depths")
    node.output(0).get_tensor().set_names({"depths"})
    for _ in range(80):
        node = ops.add(node, node)
    assert reads(node, "depths")
    assert not reads(node, "logit_rows")


# The same bits for a token, whatever is beside it.


def one_by_one(cache: Cache) -> Tensor:
    return torch.cat([cache.logits([1], TOKENS + i)[0] for i in range(NARROW)])


def test_a_token_has_the_same_logits_at_every_width_and_batch(engine: Engine, allowed: float):
    for widths in ([2], [5], [17], [1] * 8, [5] * 8, [1, 17, 3, 5, 2, 1, 1, 9], [4, 0, 2]):
        cache = Cache(engine, len(widths))
        alone = one_by_one(cache)
        for found, width in zip(cache.logits(widths), widths, strict=True):
            torch.testing.assert_close(found, alone[:width], rtol=0, atol=allowed, msg=f"of {width} in {widths}")


def test_prompts_that_are_read_together_have_the_bits_of_each_alone(engine: Engine, allowed: float):
    """Long and short ones, new and begun, with a row between them that reads nothing."""
    choose, lengths, begun = torch.Generator().manual_seed(1), [200, 5, 0, 40, 17, 18, 1], [64, 0, 0, 33, 2, 0, 0]
    tokens = [torch.randint(engine.contract.vocab_size, (length,), generator=choose) for length in lengths]
    rows = [row for row, length in enumerate(lengths) if length]
    found = {}
    for together in (True, False):
        model = Model(engine, engine.contract.vocab_size, len(lengths), 256)
        for row in rows:
            if begun[row]:
                model.prefill([row], [tokens[row][: begun[row]]])
        if together:
            logits = model.prefill(rows, [tokens[row] for row in rows])[rows].clone()
        else:
            logits = torch.cat([model.prefill([row], [tokens[row]]).clone() for row in rows])
        caches = [
            model.cache.read(row, name)[:, : lengths[row]] for row in rows for name in engine.contract.cache_names
        ]
        found[together] = [logits, *caches]
    for ours, alone in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(ours, alone, rtol=0, atol=allowed)


def test_padding_a_step_changes_no_bit_and_touches_no_row(engine: Engine, allowed: float):
    """After a step of 5 tokens steps of 1 are padded to 5 for a while."""
    cache = Cache(engine, 1)
    alone = one_by_one(cache)
    cache.logits([5])
    before = {name: cache.memory[name][SPARE_BLOCK + 1 :].clone() for name in engine.contract.cache_names}
    [found] = cache.logits([1])
    assert engine._size == 5
    torch.testing.assert_close(found, alone[:1], rtol=0, atol=allowed)
    for name, blocks in before.items():
        torch.testing.assert_close(cache.memory[name][SPARE_BLOCK + 1 :], blocks, rtol=0, atol=allowed)


def test_tokens_beyond_a_rows_width_are_not_computed(engine: Engine):
    cache = Cache(engine, 2)
    before = cache.memory["key_0"].clone()
    cache.logits([2, 0])
    changed = (cache.memory["key_0"] != before).any(-1).any(1).nonzero().tolist()
    first = cache.memory["blocks"][0, TOKENS // BLOCK_TOKENS]
    written = [[int(first), (TOKENS + i) % BLOCK_TOKENS] for i in range(2)]
    assert [place for place in changed if place[0] != SPARE_BLOCK] == written


# The size of a call.


def sizes(engine: Engine, tokens: list[int]) -> list[int]:
    engine._size = engine._smaller = 0
    return [engine._size_for(count) for count in tokens]


def test_a_narrow_call_keeps_its_size_while_that_costs_next_to_nothing(engine: Engine):
    assert sizes(engine, [5, 1, 5, 3, 5]) == [5] * 5
    assert sizes(engine, [1, 5, 4]) == [1, 5, 5]
    assert sizes(engine, [40, 39, 38, 37, 37]) == [40, 40, 40, 37, 37]


def test_a_call_shrinks_after_several_that_needed_less(engine: Engine):
    assert sizes(engine, [8] + [1] * 6) == [8] * 5 + [1] * 2


# What it refuses.


def test_a_soft_cap_is_refused_by_name(pairs):
    with pytest.raises(EngineError, match=r"engine openvino cannot run .*soft-cap.*; use engine onnxruntime"):
        opened(pairs("gemma2").bundle)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("diffllama", "the values of its attention are not the entries of one state"),
        ("qwen3_moe", "experts have three dimensions"),
    ],
)
def test_attention_or_experts_that_it_cannot_run_are_refused_by_name(tmp_path: Path, kind: str, reason: str):
    """One layer of them is enough."""
    checkpoint = tiny_checkpoint(kind, tmp_path / "checkpoint", num_hidden_layers=1)
    pair = export_pair(checkpoint, tmp_path / "bundle")
    with pytest.raises(EngineError, match=rf"engine openvino cannot run .*{reason}.*; use engine onnxruntime"):
        opened(pair.bundle)


def read_keys_of_another_layer(model: onnx.ModelProto) -> None:
    first, second = nodes(model, "Attention")
    second.input[1] = first.input[1]


def window_alone(model: onnx.ModelProto) -> None:
    for node in nodes(model, "Attention"):
        node.input[3] = nodes(model, "Greater")[0].output[0]


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("llama", see_one_row_too_many, "a mask by LogicalOr"),
        ("llama", mask_as_if_every_call_were_the_first, "a mask by LessEqual"),
        ("llama", see_what_is_as_deep, "a mask by ScatterElementsUpdate"),
        ("mistral", see_all_before_in_the_call, "a mask by ScatterElementsUpdate"),
        ("mistral", measure_the_window_by_columns, "a mask by Greater"),
        ("mistral", window_alone, "not causal"),
        ("llama", read_keys_of_another_layer, "its cache key_0 is read by more than one attention"),
    ],
)
def test_a_mask_or_a_cache_that_it_does_not_know_is_refused_by_name(
    tmp_path: Path, kind: str, change: Callable[[onnx.ModelProto], None], reason: str
):
    """Else it would compute what it takes for that mask, or see the new entries alone."""
    pair = export_pair(tiny_checkpoint(kind, tmp_path / "checkpoint"), tmp_path / "bundle")
    bundle = Bundle.open(pair.bundle)
    graph = bundle.graph("target")
    opened(pair.bundle).close()
    model = onnx.load(graph, load_external_data=False)
    change(model)
    onnx.save(model, graph)
    with pytest.raises(EngineError, match=rf"engine openvino cannot run .*{reason}.*; use engine onnxruntime"):
        open_engine("openvino", graph, bundle.target.contract)


def test_another_dtype_or_device_is_refused(llama: Pair, tmp_path: Path):
    with pytest.raises(EngineError, match="is float16, engine openvino expects float32"):
        opened(export_pair(llama.checkpoint, tmp_path / "bundle", dtype="float16").bundle)
    with pytest.raises(EngineError, match="engine openvino runs on the device cpu, not on 'cuda'"):
        opened(llama.bundle, device="cuda")


def test_a_graph_that_breaks_its_contract_is_refused(llama: Pair):
    bundle = Bundle.open(llama.bundle)
    contract = bundle.target.contract
    wrong = replace(contract, states=keys_and_values(contract.layers, 2, 32, "float32"))
    with pytest.raises(ContractError, match="has the input past_key_0"):
        open_engine("openvino", bundle.graph("target"), wrong)


def test_a_damaged_graph_is_an_error_in_a_sentence(llama: Pair, tmp_path: Path):
    bundle = Bundle.open(llama.bundle)
    shutil.copytree(bundle.graph("target").parent, tmp_path / "graph")
    (tmp_path / "graph" / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(EngineError, match=r"engine openvino cannot run .*model.onnx"):
        open_engine("openvino", tmp_path / "graph" / "model.onnx", bundle.target.contract)


def test_a_missing_or_untested_library_is_named(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    library = sys.modules["openvino"]
    monkeypatch.setattr(library, "__version__", "2031.1.0-1")
    with pytest.raises(EngineError, match=rf"needs OpenVINO {VERSION}, found 2031.1.0-1"):
        opened(llama.bundle)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(EngineError, match=r"needs the openvino package; pip install 'trt-spec\[openvino\]'"):
        opened(llama.bundle)


def test_a_signal_is_heard_after_an_engine_has_ended_in_another_thread(llama: Pair):
    """On a processor with AMX it killed the process, which Python's own handler cannot tell."""
    script = """
import gc, signal, sys, threading
from pathlib import Path
from trt_spec.engines import Bundle, open_engine

bundle = Bundle.open(Path(sys.argv[1]))
engines = [open_engine("openvino", bundle.graph("target"), bundle.target.contract) for _ in range(2)]

def end():
    engines.pop(0).close()
    gc.collect()

ending = threading.Thread(target=end)
ending.start()
ending.join()
signal.signal(signal.SIGTERM, lambda *_: print("heard"))
signal.raise_signal(signal.SIGTERM)
engines.clear()
gc.collect()
signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", script, llama.bundle], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "heard\nheard\n"), done.stderr


# In the loop.


@pytest.mark.parametrize("draft_engine", ["openvino", "onnxruntime"])
def test_text_is_that_of_onnxruntime_for_any_draft_and_batch(llama: Pair, draft_engine: str):
    prompts = [[5, 9, 17], [40] * 50, [3], [7, 8] * 20]
    params = [
        SamplingParams(max_new_tokens=40, temperature=temperature, rule="coupled", seed=seed, ignore_eos=True)
        for seed, temperature in enumerate((0.0, 0.8, 0.0, 1.0))
    ]
    with Decoder.open(llama.bundle) as decoder:
        expected = [one.token_ids for one in decoder.generate(prompts, params, draft_length=0)]
    with Decoder.open(llama.bundle, "openvino", draft_engine=draft_engine, max_batch=3) as decoder:
        for drafter, k in (("none", 0), ("model", 4), ("cascade", 3), ("lookup", 8), ("suffix", 5)):
            found = decoder.generate(prompts, params, drafter=drafter, draft_length=k)
            assert [one.token_ids for one in found] == expected


def test_a_draft_here_takes_part_in_a_cascade_for_a_target_that_verifies_wider_steps(llama: Pair):
    params = SamplingParams(max_new_tokens=20, ignore_eos=True)
    with Decoder.open(llama.bundle, draft_engine="openvino") as decoder:
        expected, found = (
            decoder.generate([[7, 8] * 9], params, drafter="cascade", draft_length=k)[0] for k in (0, 16)
        )
        assert found.token_ids == expected.token_ids
        assert found.speculation.accepted
        comb = decoder.generate([[7, 8] * 9], params, draft_length="3+4")[0]
        assert comb.token_ids == expected.token_ids


def test_each_row_verifies_only_what_it_proposes(llama: Pair):
    """One row with 8 proposals beside one without: 9 + 1 tokens, where rows of one width would be 18."""
    with Decoder.open(llama.bundle, "openvino", draft_engine="onnxruntime") as decoder:
        params = SamplingParams(max_new_tokens=40, ignore_eos=True)
        wide = decoder.submit([5, 9, 17], params, draft_length=8)
        decoder.submit([6, 10, 18], params, draft_length=0)
        decoder.step()
        decoder.step()
        assert len(decoder.live) == 2
        assert wide.speculation.histogram != []
        engine = decoder.target.engine
        assert isinstance(engine, OpenVinoEngine)
        assert engine._size == 10
