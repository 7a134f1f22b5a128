"""Quantised weights: what is rounded and how far, that the graph computes just that, and that engines fuse it."""

from collections import Counter
from pathlib import Path

import ml_dtypes
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trt_spec.engines import Bundle, EngineError, ExportError, blank_cache, blank_step, open_engine
from trt_spec.engines.onnxruntime import Threads, open_session
from trt_spec.export import export_bundle
from trt_spec.export.checking.quality import engine_logits, measure, overlap
from trt_spec.export.passes.quantise import Quantisation, to_blocks
from trt_spec.export.passes.stack_heads import unstack_heads
from trt_spec.runtime import Decoder, SamplingParams

from ..engines.parity import assert_engine_agrees
from ..kit.bundles import export_pair
from ..kit.families import tiny_checkpoint
from ..kit.models import tiny_gemma2, tiny_gpt2, tiny_llama
from ..kit.recorded import transformers_greedy

pytestmark = pytest.mark.usefixtures("shared_traces")

MAKERS = {"llama": tiny_llama, "gpt2": tiny_gpt2, "gemma2": tiny_gemma2}


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_no_number_moves_by_more_than_half_a_step(kind: str) -> None:
    matrix = torch.randn(96, 5, generator=torch.Generator().manual_seed(0))
    blocks = to_blocks(matrix, kind, 32)
    steps = blocks.scales.abs().repeat_interleave(32, 0)
    missed = (blocks.matrix() - matrix).abs()
    if kind == "int8":
        assert (missed <= steps / 2 * 1.0001).all()
        assert blocks.numbers.abs().amax() == 127
    else:  # a smaller step that cuts off the largest number may be the better one
        assert (missed <= steps / 2 * 1.0001).float().mean() > 0.95
        assert (blocks.numbers.min(), blocks.numbers.max()) >= (-8, 0)


def test_int4_scales_are_at_least_as_good_as_the_plain_ones() -> None:
    matrix = torch.randn(64, 200, generator=torch.Generator().manual_seed(1))
    view = matrix.view(2, 32, 200)
    plain = view.gather(1, view.abs().argmax(1, keepdim=True)) / -8
    plain_error = ((view / plain).round().clamp(-8, 7) * plain - view).square().sum(1)
    found = to_blocks(matrix, "int4", 32)
    error = (found.matrix().view_as(view) - view).square().sum(1)
    assert (error <= plain_error + 1e-6).all()
    assert error.sum() < 0.95 * plain_error.sum()


def test_an_fp8_number_moves_by_a_sixteenth_of_itself_at_most() -> None:
    matrix = torch.randn(96, 5, generator=torch.Generator().manual_seed(0))
    blocks = to_blocks(matrix, "fp8", 96)
    assert torch.equal(blocks.numbers.float().abs().amax(0), torch.full((5,), 448.0))
    least = blocks.scales * 2**-10  # half of the smallest step
    assert ((blocks.matrix() - matrix).abs() <= torch.maximum(matrix.abs() / 16, least) * 1.0001).all()


def test_nvfp4_is_the_nearest_number_of_four_bits_under_the_best_of_some_scales() -> None:
    matrix = torch.randn(512, 40, generator=torch.Generator().manual_seed(1))
    view = matrix.view(32, 16, 40)  # more than are rounded at a time
    blocks = to_blocks(matrix, "nvfp4", 16)
    parts, whole = blocks.made_of
    assert torch.equal(parts.float() * whole, blocks.scales)
    assert whole == matrix.abs().max() / 6 / 448

    def rounded(scales: torch.Tensor) -> torch.Tensor:
        numbers = (view / scales[:, None]).numpy().astype(ml_dtypes.float4_e2m1fn)
        return torch.tensor(numbers.astype("float32")) * scales[:, None]

    assert torch.equal(blocks.matrix().view_as(view), rounded(blocks.scales))
    largest = (view.abs().amax(1) / 6 / whole).numpy().astype(ml_dtypes.float8_e4m3fn)
    assert largest.max() == 448
    plain = (rounded(torch.tensor(largest.astype("float32")) * whole) - view).square().sum(1)
    error = (blocks.matrix().view_as(view) - view).square().sum(1)
    assert (error <= plain + 1e-6).all()
    assert error.sum() < 0.8 * plain.sum()


def test_a_matrix_of_small_numbers_loses_no_more_to_nvfp4_in_float16() -> None:
    """The float of all its scales would be rounded to nothing."""
    matrix = torch.randn(64, 50, generator=torch.Generator().manual_seed(1))

    def lost(part: torch.Tensor) -> float:
        return float((to_blocks(part, "nvfp4", 16).matrix() - part.float()).std() / part.float().std())

    assert lost((matrix * 1e-5).half()) < 1.05 * lost(matrix)


@pytest.mark.parametrize("kind", ["int8", "int4", "fp8", "nvfp4"])
@pytest.mark.parametrize("matrix", [torch.zeros(32, 3), torch.full((32, 3), 1e-7, dtype=torch.float16)])
def test_a_block_of_next_to_nothing_is_zero_and_has_a_scale_that_tensorrt_takes(
    matrix: torch.Tensor, kind: str
) -> None:
    blocks = to_blocks(matrix, kind, 16)
    assert not blocks.matrix().any()
    assert (blocks.scales.to(matrix.dtype) > 0).all()


def test_an_int8_scale_is_for_128_rows_or_as_many_as_divide_the_matrix(tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint", hidden_size=256, intermediate_size=192)
    export_bundle(checkpoint, tmp_path / "bundle", weights=Quantisation("int8"))  # and check what it computes
    graph = ir.load(Bundle.open(tmp_path / "bundle").graph("target")).graph
    matrices = [node for node in graph if node.op_type == "DequantizeLinear" and node.inputs[0].is_initializer()]
    blocks = {(node.inputs[0].shape[0], node.attributes.get_int("block_size")) for node in matrices}
    assert blocks == {(256, 128), (192, 64), (64, 64)}


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "int8"),
        ("gemma2", "int4"),
        *(
            pytest.param(family, kind, marks=pytest.mark.exhaustive)
            for family in MAKERS
            for kind in ("int8", "int4")
            if (family, kind) not in (("llama", "int8"), ("gemma2", "int4"))
        ),
    ],
)
def test_a_quantised_graph_computes_its_rounded_checkpoint_and_is_fused(tmp_path: Path, family: str, kind: str) -> None:
    """The built-in check holds the graph to the float32 tolerance against the checkpoint with the same rounding."""
    checkpoint = MAKERS[family](tmp_path / "checkpoint")
    report = export_bundle(checkpoint, tmp_path / "bundle", weights=Quantisation(kind))
    [target] = report.models
    assert target.entry.check["worst_error"] < 5e-5
    assert target.entry.weights == kind
    quality = target.entry.check["quality"]
    assert 0 < quality["divergence"] < (0.02 if kind == "int8" else 1.0)
    graph = Bundle.open(tmp_path / "bundle").graph("target")
    written = Counter(node.op_type for node in ir.load(graph).graph)
    nodes = fused_nodes(graph, tmp_path / "fused.onnx")
    ran = Counter(node.op_type for node in nodes)
    assert written["MatMul"] == ran["MatMulNBits"] >= 8
    assert ran["MatMul"] == 0
    widened = [node.inputs[0].name for node in nodes if node.op_type == "DequantizeLinear"]
    assert widened
    assert all(name.endswith(".rows") for name in widened), "only rows of the embedding that were looked up"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("int8", "bfloat16"),
        ("int4", "float16"),
        ("nvfp4", "float16"),
        pytest.param("nvfp4", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("fp8", "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param("int8", "float16", marks=pytest.mark.exhaustive),
        pytest.param("int4", "bfloat16", marks=pytest.mark.exhaustive),
    ],
)
def test_in_half_precision_weights_are_what_rounded_scales_make_of_them(tmp_path: Path, kind: str, dtype: str) -> None:
    """The float32 copy that is checked rounds each weight once, as an engine with such kernels does."""
    checkpoint = tiny_gpt2(tmp_path / "checkpoint", n_layer=1)
    [target] = export_bundle(checkpoint, tmp_path / "bundle", weights=Quantisation(kind), dtype=dtype).models
    assert target.entry.check["as_float32_copy"] is True
    assert target.entry.check["worst_error"] < 5e-5


def test_an_fp8_graph_computes_its_rounded_checkpoint_in_every_engine_and_a_tied_matrix_stays_wide(
    tmp_path: Path,
) -> None:
    checkpoint = tiny_gpt2(tmp_path / "checkpoint")
    [target] = export_bundle(checkpoint, tmp_path / "bundle", weights=Quantisation("fp8")).models
    assert target.entry.check["worst_error"] < 5e-5
    assert 0 < target.entry.check["quality"]["divergence"] < 0.1
    graph = ir.load(Bundle.open(tmp_path / "bundle").graph("target")).graph
    stored = Counter(weight.dtype for weight in graph.initializers.values() if len(weight.shape) == 2)
    assert stored == {ir.DataType.FLOAT8E4M3FN: 2 * 4, ir.DataType.FLOAT: 2}  # the embeddings of tokens and positions
    for engine in ("torch", "openvino"):
        assert_engine_agrees(tmp_path / "bundle", engine)


def test_an_nvfp4_graph_says_what_its_rounded_checkpoint_says_in_every_engine_with_kernels(tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint")
    [target] = export_bundle(checkpoint, tmp_path / "bundle", weights=Quantisation("nvfp4")).models
    assert target.entry.check["worst_error"] < 5e-5
    assert 0 < target.entry.check["quality"]["divergence"] < 1
    graph = Bundle.open(tmp_path / "bundle").graph("target")
    assert sorted(file.name for file in graph.parent.iterdir()) == ["model.onnx", "weights.bin"]
    weights = ir.load(graph).graph.initializers
    matrices = {name for name, weight in weights.items() if weight.dtype == ir.DataType.FLOAT4E2M1}
    assert len(matrices) == 2 * 7 + 1
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    for name in matrices:  # by the words of ONNX
        matrix = name.removesuffix(".T.nvfp4")
        names = (name, f"{matrix}.T.scales", f"{matrix}.T.scale")
        numbers, parts, whole = (torch.tensor(weights[one].const_value.numpy().astype("float32")) for one in names)
        wide = numbers * (parts * whole).repeat_interleave(16, 0)
        model.get_parameter(matrix).data.copy_(wide.T)
    prompts = [[5, 6, 7], [40, 41, 42, 43, 9]]
    expected = transformers_greedy(model, prompts, 40)
    params = SamplingParams(max_new_tokens=40)
    for engine in ("torch", "openvino"):
        with Decoder.open(tmp_path / "bundle", engine=engine) as decoder:
            found = decoder.generate(prompts, params, draft_length=3, drafter="lookup")
        assert [list(output.token_ids) for output in found] == expected, engine
    with pytest.raises(EngineError) as refused:
        Decoder.open(tmp_path / "bundle")
    assert str(refused.value) == (
        "engine onnxruntime has no kernels for nvfp4, in which the target has its weights; "
        "use engine openvino or openvino-bfloat16 or torch or torch-compiled or tensorrt"
    )


def fused_nodes(graph: Path, out: Path) -> list[ir.Node]:
    """What ONNX Runtime makes of a graph; each MatMulNBits must compute in int8."""
    import onnxruntime

    session = onnxruntime.InferenceSession

    def saving(path, options, **more):
        options.optimized_model_filepath = str(out)
        return session(path, options, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(onnxruntime, "InferenceSession", saving)
        open_session(graph, Threads(1, stay_awake=False))
    nodes = list(ir.load(out).graph)
    assert all(node.attributes.get_int("accuracy_level") == 4 for node in nodes if node.op_type == "MatMulNBits")
    return nodes


def test_head_and_embedding_may_stay_wide(tmp_path: Path) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint", tie_word_embeddings=True)
    how = Quantisation("int8", wide_head=True, wide_embedding=True)
    export_pair(checkpoint, tmp_path / "bundle", weights=how)
    graph = ir.load(Bundle.open(tmp_path / "bundle").graph("target")).graph
    assert Counter(node.op_type for node in graph)["DequantizeLinear"] == 2 * 5  # of two layers
    matrices = [weight.name for weight in graph.initializers.values() if weight.dtype == ir.DataType.FLOAT]
    assert [name for name in matrices if "embed" in name] == ["model.embed_tokens.weight"]


@pytest.mark.parametrize("flags", [{"wide_head": True}, {"wide_embedding": True}])
def test_a_tied_matrix_that_shall_stay_wide_for_one_use_stays_so_for_both(
    tmp_path: Path, flags: dict[str, bool]
) -> None:
    """Rounded for the other use it would be rounded for this one, too: it is one matrix."""
    checkpoint = tiny_gpt2(tmp_path / "c")
    export_pair(checkpoint, tmp_path / "b", weights=Quantisation("int8", **flags))
    table = ir.load(Bundle.open(tmp_path / "b").graph("target")).graph.initializers["transformer.wte.weight"]
    original = load_file(checkpoint / "model.safetensors")["transformer.wte.weight"]
    assert torch.equal(torch.tensor(table.const_value.numpy()), original)
    assert sorted(use.node.op_type for use in table.uses()) == ["Gather", "Gemm"]


def test_an_untied_one_stays_wide_alone(tmp_path: Path) -> None:
    how = Quantisation("int8", wide_head=True)
    export_pair(tiny_llama(tmp_path / "c"), tmp_path / "b", weights=how)
    names = set(ir.load(Bundle.open(tmp_path / "b").graph("target")).graph.initializers)
    assert {"lm_head.weight.T", "model.embed_tokens.weight.int8"} < names


def test_a_tied_embedding_and_head_stay_equal(tmp_path: Path) -> None:
    export_pair(tiny_gpt2(tmp_path / "c"), tmp_path / "b", weights=Quantisation("int4"))
    weights = ir.load(Bundle.open(tmp_path / "b").graph("target")).graph.initializers
    rows = torch.tensor(weights["transformer.wte.weight.int8"].const_value.numpy())
    head = torch.tensor(weights["transformer.wte.weight.T.int4"].const_value.numpy().astype("int8"))
    assert torch.equal(rows, head.T)


@pytest.mark.parametrize("kind", ["int8", pytest.param("nvfp4", marks=pytest.mark.exhaustive)])
def test_matrices_no_block_divides_stay_wide(tmp_path: Path, kind: str) -> None:
    checkpoint = tiny_llama(tmp_path / "checkpoint", hidden_size=24, intermediate_size=32, num_hidden_layers=1)
    [target] = export_bundle(checkpoint, tmp_path / "bundle", weights=Quantisation(kind)).models
    assert target.fired["quantise"] == 2, "down_proj with 32 rows and o_proj with 4 heads of 16; 24 is no block"


@pytest.mark.exhaustive
def test_the_experts_of_a_mixture_stay_wide(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint")
    export_pair(checkpoint, tmp_path / "bundle", weights=Quantisation("int8"))
    weights = ir.load(Bundle.open(tmp_path / "bundle").graph("target")).graph.initializers
    experts = [weight for weight in weights.values() if len(weight.shape) == 3]
    assert len(experts) == 2 * 2  # in each layer one for gate and up, one for down
    assert {weight.dtype for weight in experts} == {ir.DataType.FLOAT}
    assert any(name.endswith(".int8") for name in weights)


def test_speculation_is_lossless_on_quantised_models(tmp_path: Path) -> None:
    """The greedy text of an int8 target with an int4 draft is that of the target alone."""
    checkpoint = tiny_llama(tmp_path / "checkpoint")
    report = export_bundle(
        checkpoint,
        tmp_path / "bundle",
        draft=checkpoint,
        weights=Quantisation("int8"),
        draft_weights=Quantisation("int4"),
    )
    assert [model.entry.weights for model in report.models] == ["int8", "int4"]
    assert 0.5 < report.overlap["draft"][1.0] < 1
    params = SamplingParams(max_new_tokens=40, ignore_eos=True)
    prompts = [[5, 6, 7], [40, 41, 42, 43, 9], [11] * 20]
    with Decoder.open(tmp_path / "bundle") as decoder:
        plain = [decoder.generate(prompt, params, draft_length=0)[0].token_ids for prompt in prompts]
        for k in (1, 4):
            found = [decoder.generate(prompt, params, draft_length=k)[0].token_ids for prompt in prompts]
            assert found == plain
        assert decoder.speculation.accepted > 0


def test_an_int8_token_has_the_same_bits_alone_and_beside_others(tmp_path: Path) -> None:
    """Attention gets heads that share keys as rows of one. A single row would be summed in another order, and where
    activations are rounded a last bit decides: apart, the logits differ by 0.3."""
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    report = export_bundle(
        tiny_llama(tmp_path / "checkpoint", **size), tmp_path / "bundle", weights=Quantisation("int8")
    )
    assert report.models[0].fired["stack_heads"] == 4
    bundle = Bundle.open(tmp_path / "bundle")
    engine = open_engine("onnxruntime", bundle.graph("target"), bundle.target.contract)

    def read(width: int) -> torch.Tensor:
        cache, found = blank_cache(engine.contract, 2, 40, "cpu"), []
        for start in range(0, 40, width):
            step = blank_step(engine, cache, 0, 2, width, width)
            step.input_ids.copy_((torch.arange(80) * 7 % 61).view(2, 40)[:, start : start + width])
            step.start.fill_(start)
            step.run()
            found.append(step.logits.clone())
        return torch.cat(found, 1)

    alone = read(1)
    for width in (2, 4, 5, 10, 40):
        torch.testing.assert_close(read(width), alone, rtol=0, atol=0)
    engine.close()


@pytest.mark.parametrize(("kind", "settings"), [("llama", {}), ("falcon", {"alibi": True})])
def test_heads_that_were_stacked_are_unstacked_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, bool]
) -> None:
    def exported(name: str) -> ir.Model:
        export_bundle(tmp_path / "checkpoint", tmp_path / name, weights=Quantisation("int8"), check=False)
        return ir.load(Bundle.open(tmp_path / name).graph("target"))

    def nodes(model: ir.Model) -> list[tuple[str, list[int | str]]]:
        """Each with the places of the nodes that it reads, and the shapes of weights."""
        places = {value: place for place, node in enumerate(model.graph) for value in node.outputs}
        return [
            (node.op_type, [places.get(value, str(value and value.shape)) for value in node.inputs])
            for node in model.graph
        ]

    tiny_checkpoint(kind, tmp_path / "checkpoint", **settings)
    stacked = exported("stacked")
    monkeypatch.setattr("trt_spec.export.writing.graph.STORED", {})
    apart = exported("apart")
    assert len(stacked.graph) > len(apart.graph)
    assert unstack_heads(stacked) == sum(node.op_type == "Attention" for node in apart.graph)
    assert nodes(stacked) == nodes(apart)


def test_an_unknown_kind_of_weights_is_refused() -> None:
    with pytest.raises(ExportError, match="weights are 'int2', expected auto, none, int8, int4, fp8, nvfp4"):
        Quantisation("int2")


def test_quality_is_measured_against_the_checkpoint() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    same = measure(logits, logits, [0, 0, 1])
    assert (same.worst_logit_error, same.divergence) == (0, 0)
    assert same.perplexity == same.checkpoint_perplexity == pytest.approx((1 + 2.718281828**-2), abs=1e-6)
    worse = measure(logits, logits.flip(1), [0, 0, 1])
    assert worse.perplexity > same.perplexity
    assert worse.divergence == pytest.approx((2 * 2 * 0.7615941560) / 3)  # 2·tanh(1) in two of three rows


def test_overlap_is_the_sum_of_the_smaller_probabilities() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.1, 0.3, 0.6]]).log()
    assert overlap(p, q, 1.0) == pytest.approx(0.6)
    assert (overlap(p, q, 0.0), overlap(p, p, 0.0)) == (0.0, 1.0)


def test_text_is_read_in_chunks_as_a_whole(graphs) -> None:
    from trt_spec.engines import open_engine

    graph = graphs("llama")
    tokens = torch.randint(64, (150,), generator=torch.Generator().manual_seed(2)).tolist()
    engine = open_engine("onnxruntime", graph.file, graph.contract)
    logits = engine_logits(engine, tokens)
    again = torch.cat([engine_logits(engine, tokens[:70]), engine_logits(engine, tokens)[70:]])
    torch.testing.assert_close(logits, again, atol=1e-4, rtol=0)
