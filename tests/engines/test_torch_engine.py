"""The engine torch computes what ONNX Runtime does, in place, without a look at a tensor's value on the host."""

import gc
import shutil
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from trt_spec.engines import Bundle, Contract, Engine, EngineError, blank_cache, blank_step, open_engine
from trt_spec.engines.torch import ops
from trt_spec.engines.torch.engine import TRIAL, TorchEngine
from trt_spec.export.checking.scenarios import write_script
from trt_spec.export.passes.quantise import Quantisation
from trt_spec.runtime import Decoder, SamplingParams
from trt_spec.runtime.memory.tokens import Tokens

from ..kit.bundles import Pair, export_pair
from ..kit.models import tiny_gpt2, tiny_llama
from ..kit.steps import feed, model_of
from .parity import assert_engine_agrees, run_script, write_trees

FAMILIES = ("llama", "gpt2", "gemma2")


def opened(pair: Pair, name: str = "torch", device: str = "cpu") -> Engine:
    bundle = Bundle.open(pair.bundle)
    return open_engine(name, bundle.graph("target"), bundle.target.contract, device)


@pytest.fixture(scope="module")
def engine(llama: Pair) -> Engine:
    return opened(llama)


def test_nothing_holds_weights_once_it_is_closed(llama: Pair):
    """Nor does an engine over the same constants, as shards have for rounds that pick the best token."""
    closed = opened(llama)
    assert isinstance(closed, TorchEngine)
    other = closed.over(list)
    for one in (closed, other):
        one._module(TRIAL)
    weights = [weakref.ref(constant) for constant in closed._constants.values()]
    closed.close()
    gc.collect()
    assert weights
    assert not [one for one in weights if one() is not None]


# What it computes.


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_onnxruntime(pairs, family: str):
    """Over chunks, single steps, verify widths, rollbacks, ragged batches, with garbage where nothing was written."""
    assert_engine_agrees(pairs(family).bundle)


@pytest.mark.parametrize("family", FAMILIES)
def test_trees_have_the_logits_of_onnxruntime(pairs, family: str):
    """Alone and in a batch of different ones, each after the accepted path of another."""
    assert_engine_agrees(pairs(family).bundle, write=write_trees)


@pytest.mark.parametrize(
    ("operator", "wrong"),
    [
        ("Less", torch.ge),
        ("ScatterElements", lambda seen, *_, **__: seen),
        ("trt_spec::Gate", lambda gate, up, activation: torch.tanh(gate) * up),
        ("Cos", torch.sin),
        ("trt_spec::RotateWrite", lambda queries, *given, **_: (queries, *given[5:7])),
        ("trt_spec::AddNorm", lambda x, residual, *_, **__: (x, x)),
    ],
)
def test_a_wrong_operator_does_not_pass_for_parity(
    llama: Pair, monkeypatch: pytest.MonkeyPatch, operator: str, wrong: Callable[..., Tensor]
):
    monkeypatch.setitem(ops.OPS, operator, wrong)
    with pytest.raises(AssertionError, match="a logit is off by"):
        assert_engine_agrees(llama.bundle, tolerance=1e-2)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights_are_the_numbers_they_stand_for(tmp_path: Path, kind: str):
    """Of the matrices, and of the rows that are looked up in a table of integers."""
    pair = export_pair(tiny_gpt2(tmp_path / "checkpoint"), tmp_path / "bundle", weights=Quantisation(kind))
    assert_engine_agrees(pair.bundle)


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [("float16", 1e-4, 2e-2), pytest.param("bfloat16", 1e-3, 2e-1, marks=pytest.mark.exhaustive)],
)
def test_half_precision_is_close_to_float32(llama: Pair, tmp_path: Path, dtype: str, least: float, most: float):
    """On average over the logits, which deviate by 2; exactly float32 they cannot be."""
    half = opened(export_pair(llama.checkpoint, tmp_path / "bundle", dtype=dtype))
    script = write_script(64, half.contract.max_length)
    found, expected = (torch.cat(run_script(engine, script)) for engine in (half, opened(llama)))
    assert half.contract.dtype == dtype
    assert least < float((found - expected).abs().mean()) < most


def test_logits_are_given_as_they_are_before_they_are_widened(llama: Pair, tmp_path: Path) -> None:
    assert opened(llama).logits_dtype == "float32"
    half = opened(export_pair(llama.checkpoint, tmp_path / "bundle", dtype="float16"))
    assert half.logits_dtype == "float16"
    wide = blank_step(half, blank_cache(half.contract, 2, 8), 0, 2, 3, 3)
    narrow = {"logits": torch.zeros_like(wide.logits, dtype=torch.float16)}
    steps = [wide, half.step(wide.inputs, {**wide.outputs, **narrow})]
    for step in steps:
        step.run()
    assert steps[0].logits.any()
    assert torch.equal(steps[0].logits, steps[1].logits.float())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_new_tokens=24),
        SamplingParams(max_new_tokens=24, temperature=0.9, seed=7),
        SamplingParams(max_new_tokens=24, temperature=0.9, seed=7, rule="coupled"),
    ],
    ids=["greedy", "rejection", "coupled"],
)
def test_text_is_that_of_onnxruntime(pairs, family: str, params: SamplingParams):
    prompts = [[5, 9, 17], [40, 41, 42, 43, 44, 45, 9], [11]]
    texts = []
    for engine in ("onnxruntime", "torch"):
        with Decoder.open(pairs(family).bundle, engine=engine, max_batch=2) as decoder:
            texts.append([output.token_ids for output in decoder.generate(prompts, params, draft_length=3)])
            assert decoder.speculation.accepted > 0
    assert texts[0] == texts[1]


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_on_a_gpu_are_those_of_onnxruntime(pairs, family: str):
    assert_engine_agrees(pairs(family).bundle, device="cuda")


def test_prompts_of_every_width_take_few_conversions_and_give_what_one_call_gives(llama: Pair):
    engine, oracle = opened(llama), opened(llama, "onnxruntime")
    models = [model_of(each, 1) for each in (engine, oracle)]
    tokens = torch.randint(64, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    for width in range(1, 41):
        for model in models:
            model.cache.entries[0] = 3
            model.prefill([0], [torch.tensor([0] * 3 + tokens[:width])])
        found, expected = (model.logits(1, 1) for model in models)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, msg=f"width {width}")
    assert engine._module.cache_info().misses == 6  # 1, 2, 4, 8, 16, 32
    for ours, theirs in zip(*(model.cache.buffers.values() for model in models), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


# The cache.


def test_a_batched_step_writes_its_own_cache_entries_in_place_and_no_others(engine: Engine):
    model = model_of(engine, 4)
    step = blank_step(engine, model.cache.buffers, 1, 3, 2, 2)
    step.input_ids.copy_(torch.tensor([[3, 4], [5, 6], [7, 8]]))
    step.start.copy_(torch.tensor([0, 9, 62]))
    step.run()
    for buffer in model.cache.buffers.values():
        changed = (buffer != 7.0).any(-1).any(1)  # [rows, T]
        assert [row.nonzero().flatten().tolist() for row in changed] == [[], [0, 1], [9, 10], [62, 63]]


class Watching(TorchDispatchMode):
    """Sees every operation that torch runs, with the tensors it read and made."""

    def __init__(self, see: Callable[[Any, list[Tensor], list[Tensor]], None]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self.see(func, *([x for x in tree_leaves(tree) if isinstance(x, Tensor)] for tree in ((args, kwargs), output)))
        return output


@pytest.mark.parametrize("family", FAMILIES)
def test_no_operation_makes_a_tensor_as_large_as_a_cache_buffer(pairs, family: str):
    """Grouped heads must be found without a copy of the whole capacity for each of them."""
    engine = opened(pairs(family))
    model = model_of(engine, 1, capacity=4096)
    own = {buffer.untyped_storage().data_ptr() for buffer in model.cache.buffers.values()}
    limit = next(iter(model.cache.buffers.values())).numel()
    seen = []

    def see(func: Any, _: list[Tensor], outputs: list[Tensor]) -> None:
        seen.extend(str(func) for x in outputs if x.numel() >= limit and x.untyped_storage().data_ptr() not in own)

    step = blank_step(engine, model.cache.buffers, 0, 1, 2, 2)
    with Watching(see):
        step.run()
        assert not seen
        next(iter(model.cache.buffers.values())).clone()
    assert seen == ["aten.clone.default"]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_over_the_first_entries_of_longer_caches_reads_these_in_place_and_no_others(
    pairs, family: str, width: int
):
    engine = opened(pairs(family))
    logits, caches = [], []
    for live in (4096, 2048):
        model = model_of(engine, 2, capacity=4096)
        feed(model, 0, [5, 9, 17, 5, 9, 3], 0)
        feed(model, 1, [40, 41, 42], 0)
        cache = {name: buffer[:, :, :live] for name, buffer in model.cache.buffers.items()}
        own = {buffer.untyped_storage().data_ptr() for buffer in cache.values()}
        read, copied = set(), []

        def see(func: Any, inputs: list[Tensor], outputs: list[Tensor], own=own, read=read, copied=copied) -> None:
            cached = [x for x in inputs if x.untyped_storage().data_ptr() in own]
            read.update(max(x.shape[2:]) for x in cached)
            new = [x for x in outputs if x.untyped_storage().data_ptr() not in own]
            copied.extend(str(func) for x in new for y in cached if x.numel() >= y.numel())

        step = blank_step(engine, cache, 0, 2, width, width)
        step.input_ids.copy_(torch.arange(2 * width).view(2, width) + 7)
        step.start.copy_(torch.tensor([6, 3]))
        with Watching(see):
            step.run()
        assert read == {live}
        assert not copied
        logits.append(step.logits)
        caches.append(torch.stack(list(model.cache.buffers.values())))
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
    torch.testing.assert_close(*caches, atol=1e-4, rtol=0)


def test_a_step_keeps_the_memory_it_was_made_on(engine: Engine):
    first, second = model_of(engine, 1), model_of(engine, 1)
    step = blank_step(engine, first.cache.buffers, 0, 1, 1, 1)
    step.start.fill_(5)
    step.run()
    for before, after in zip(first.cache.buffers.values(), second.cache.buffers.values(), strict=True):
        assert (before[0, :, 5] != 7.0).any()
        assert (after == 7.0).all()


def test_steps_may_share_the_callers_tensors(engine: Engine):
    """The start of one step may be a row of a larger tensor, and all steps may write one memory of logits."""
    model = model_of(engine, 2)
    starts = torch.tensor([[0, 0], [3, 3]])
    logits = torch.zeros(2, 1, engine.contract.vocab_size)
    ids = torch.tensor([[3, 4, 5], [6, 7, 8]])
    model.step(Tokens(ids, starts[0]), logits).run()
    model.step(Tokens(ids[:, :1].contiguous(), starts[1]), logits).run()
    torch.testing.assert_close(logits[1, 0], feed(model, 1, [6, 7, 8, 6], 0), atol=1e-5, rtol=0)


def test_a_write_beyond_the_cache_is_an_error(engine: Engine):
    step = blank_step(engine, blank_cache(engine.contract, 1, 8), 0, 1, 2, 2)
    step.start.fill_(7)
    with pytest.raises(EngineError, match="torch failed at batch 1, width 2: index 8 is out of bounds"):
        step.run()


# What a CUDA graph could not capture.

READS_ON_THE_HOST = ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "unique")


class Uncapturable(Exception):
    pass


def refuse_reads(func: Any, inputs: list[Tensor], _: list[Tensor]) -> None:
    name = func.overloadpacket.__name__
    by_mask = name.startswith(("index", "_index")) and any(x.dtype == torch.bool for x in inputs[1:])
    if by_mask or name in READS_ON_THE_HOST:
        raise Uncapturable(str(func))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("batch", "width", "rows"), [(1, 1, 1), (2, 5, 5), (1, 30, 1)])
def test_a_step_reads_nothing_on_the_host(pairs, family: str, batch: int, width: int, rows: int):
    engine = opened(pairs(family))
    model = model_of(engine, batch)
    step = blank_step(engine, model.cache.buffers, 0, batch, width, rows)
    operations = []

    def see(func: Any, *tensors: list[Tensor]) -> None:
        operations.append(func)
        refuse_reads(func, *tensors)

    with Watching(see):
        step.run()
    assert len(operations) > 50


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0] > 0),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.index_put((x > 0,), x[0]),
        lambda x: torch.equal(x, x),
    ],
)
def test_a_read_on_the_host_would_be_seen(read: Callable[[Tensor], Any]):
    with Watching(refuse_reads), torch.inference_mode(), pytest.raises(Uncapturable):
        read(torch.ones(3))


def test_a_step_whose_operator_reads_on_the_host_would_be_seen(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ops.F, "scaled_dot_product_attention", read_and_attend)
    engine = opened(llama)
    model = model_of(engine, 1)
    step = blank_step(engine, model.cache.buffers, 0, 1, 1, 1)
    with Watching(refuse_reads), pytest.raises(Uncapturable):
        step.run()


def read_and_attend(query: Tensor, *others: Any, **options: Any) -> Tensor:
    if torch.overrides.has_torch_function_unary(query):
        return torch.overrides.handle_torch_function(read_and_attend, (query,), query, *others, **options)
    return query * (1.0 if query.is_meta else query.sum().item())


# What is refused, and how.


@pytest.fixture
def damaged(llama: Pair, tmp_path: Path) -> Callable[[Callable[[Any], None]], Any]:
    """`damaged(change)`: opens a copy of the target's graph after a change to it."""

    def open_changed(change: Callable[[Any], None]) -> Engine:
        bundle = Bundle.open(llama.bundle)
        model = onnx.load(bundle.graph("target"), load_external_data=False)
        change(model)
        onnx.save(model, tmp_path / "model.onnx")
        shutil.copy(bundle.graph("target").with_name("weights.bin"), tmp_path)
        return open_engine("torch", tmp_path / "model.onnx", bundle.target.contract)

    return open_changed


def first(model: Any, operator: str) -> Any:
    return next(node for node in model.graph.node if node.op_type == operator)


def test_an_undamaged_copy_opens(damaged):
    assert damaged(lambda model: None).contract.layers == 2


def test_an_unknown_operator_is_refused_by_name(damaged):
    def change(model: Any) -> None:
        first(model, "Sigmoid").op_type = "Mystery"

    with pytest.raises(EngineError, match=r"has the operator Mystery \(.+\), which engine torch does not support"):
        damaged(change)


def test_an_operator_of_another_domain_is_refused_by_name(damaged):
    def change(model: Any) -> None:
        first(model, "MatMul").domain = "com.microsoft"

    with pytest.raises(EngineError, match=r"has the operator com.microsoft::MatMul \("):
        damaged(change)


@pytest.mark.parametrize(
    ("operator", "attribute", "message"),
    [
        ("TensorScatter", {"mode": "circular"}, "with mode = 'circular'; engine torch supports only 'linear'"),
        ("Attention", {"is_causal": 1}, "with is_causal = 1; engine torch supports only 0"),
        ("RotaryEmbedding", {"rotary_embedding_dim": 8}, "cannot convert RotaryEmbedding .*'rotary_embedding_dim'"),
        ("TensorScatter", {"axis": 1}, "cannot convert TensorScatter .*: the cache is written along the axis 1"),
    ],
)
def test_an_attribute_it_does_not_know_is_refused_by_name(damaged, operator: str, attribute: dict, message: str):
    def change(model: Any) -> None:
        node, (name, value) = first(model, operator), *attribute.items()
        kept = [one for one in node.attribute if one.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    with pytest.raises(EngineError, match=message):
        damaged(change)


def test_a_shape_that_depends_on_the_data_is_refused(damaged):
    def change(model: Any) -> None:
        first(model, "Reshape").input[1] = "start"

    with pytest.raises(EngineError, match=r"cannot convert Reshape .*: a shape or an axis depends on the data"):
        damaged(change)


def copy_before_scatter(model: Any) -> None:
    node = first(model, "TensorScatter")
    model.graph.node.insert(0, helper.make_node("Neg", [node.input[0]], ["copied"]))
    node.input[0] = "copied"


def copy_after_scatter(model: Any) -> None:
    present = model.graph.output[1].name
    next(node for node in model.graph.node if present in node.output).output[0] = "written"
    model.graph.node.append(helper.make_node("Neg", ["written"], [present]))


def read_past(model: Any) -> None:
    model.graph.node.append(helper.make_node("Neg", [first(model, "TensorScatter").input[0]], ["read"]))


@pytest.mark.parametrize("change", [copy_before_scatter, copy_after_scatter, read_past])
def test_a_cache_that_is_copied_or_read_elsewhere_is_refused(damaged, change: Callable[[Any], None]):
    with pytest.raises(EngineError, match="does not make present_key_0 from past_key_0 by one TensorScatter"):
        damaged(change)


def test_operators_of_another_version_are_refused(damaged):
    def change(model: Any) -> None:
        model.opset_import[0].version = 25

    with pytest.raises(EngineError, match="has ONNX operators of version 25, engine torch expects 24"):
        damaged(change)


def test_weights_elsewhere_and_types_without_a_name_in_torch_are_refused(damaged):
    def move(model: Any) -> None:
        weight = next(one for one in model.graph.initializer if one.external_data)
        next(entry for entry in weight.external_data if entry.key == "location").value = "../other.bin"

    def retype(model: Any) -> None:
        next(one for one in model.graph.initializer if one.external_data).data_type = TensorProto.FLOAT8E5M2

    with pytest.raises(EngineError, match=r"lie in '\.\./other\.bin', expected weights\.bin; export the bundle again"):
        damaged(move)
    with pytest.raises(EngineError, match="torch has no type for the ONNX type 19; export the bundle again"):
        damaged(retype)


def test_a_file_that_is_no_graph_is_refused(tmp_path: Path, engine: Engine):
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(EngineError, match=r"engine torch cannot read .*model\.onnx: .*; export the bundle again"):
        open_engine("torch", tmp_path / "model.onnx", engine.contract)


def test_a_graph_that_breaks_its_contract_is_refused(llama: Pair):
    bundle = Bundle.open(llama.bundle)
    contract: Contract = replace(bundle.target.contract, vocab_size=65)
    with pytest.raises(Exception, match=r"has the output logits float32\[batch, rows, 64\], its contract promises"):
        open_engine("torch", bundle.graph("target"), contract)


@pytest.mark.parametrize("device", ["cuda:97", "meta", "nonsense"])
def test_a_device_that_cannot_be_used_is_named(llama: Pair, device: str):
    with pytest.raises(EngineError, match=f"engine torch cannot use the device '{device}' .*expected cpu or cuda"):
        opened(llama, device=device)


def test_missing_onnx_names_the_extra_to_install(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(EngineError, match=r"engine torch needs the onnx package; pip install 'trt-spec\[torch\]'"):
        opened(llama)


# Compiled.


def test_the_steps_of_a_round_are_compiled_and_prefill_is_not(llama: Pair, monkeypatch: pytest.MonkeyPatch):
    compiled = []

    def remember(module: Any, inputs: list[Tensor], **options: Any) -> Any:
        assert options["dynamic_shapes"] == "from_example_inputs"
        compiled.append(module)
        return module

    monkeypatch.setattr(torch._inductor, "standalone_compile", remember)
    engine = opened(llama, "torch-compiled")
    assert engine.static_capacity
    assert engine.reads_prefixes
    model = model_of(engine, 2)
    for count, shape in enumerate(((1, 1, 1), (2, 2, 1), (2, 5, 5)), start=1):
        step = blank_step(engine, model.cache.buffers, 0, *shape)
        step.run()
        assert len(compiled) == count - 1, "what runs once is not compiled"
        step.run()
        step.run()
        assert len(compiled) == count
    again = blank_step(engine, model.cache.buffers, 0, 2, 5, 5)
    again.run()
    again.run()
    assert len(compiled) == 3, "once for each shape"


@pytest.mark.exhaustive
def test_a_compiled_step_agrees_with_onnxruntime_and_writes_the_cache_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A verify width, then the same after a rollback; the prompts of the two rows differ in length.

    The compiled step runs over the first half of a longer cache.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pair = export_pair(tiny_llama(tmp_path / "checkpoint", num_hidden_layers=4), tmp_path / "bundle")
    found = {}
    for name in ("onnxruntime", "torch-compiled"):
        engine = opened(pair, name)
        model = model_of(engine, 3, capacity=128)
        feed(model, 0, [5, 9, 17, 5, 9, 3], 0)
        feed(model, 1, [40, 41, 42], 0)
        live = 64 if engine.reads_prefixes else None
        cache = {name: buffer[:, :, :live] for name, buffer in model.cache.buffers.items()}
        step = blank_step(engine, cache, 0, 2, 3, 3)
        logits = []
        for start in ([6, 3], [7, 4]):
            step.input_ids.copy_(torch.tensor([[7, 8, 9], [10, 11, 12]]) + start[0])
            step.start.copy_(torch.tensor(start))
            for _ in range(2):  # the second time it is compiled
                step.run()
            logits.append(step.logits.clone())
        found[name] = torch.stack(logits), torch.stack([b[:3, :, :64] for b in model.cache.buffers.values()])
    for ours, theirs in zip(found["torch-compiled"], found["onnxruntime"], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
