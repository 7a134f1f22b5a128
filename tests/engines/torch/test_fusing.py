"""What is fused when the engine torch opens a graph, how often, and how many kernels a layer is left with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from trt_spec.engines import Bundle, open_engine
from trt_spec.engines.torch import TorchEngine, engine, fusing
from trt_spec.engines.torch.conversion import run_node
from trt_spec.engines.torch.fusing import Rewriting, entries, few_rows
from trt_spec.engines.torch.kernels import LAUNCHES
from trt_spec.engines.torch.onnx_graph import Node
from trt_spec.export.checking.quality import engine_logits
from trt_spec.export.passes.quantise import Quantisation

from ...kit.bundles import export_pair
from ...kit.families import tiny_checkpoint
from ...kit.launches import random
from ...kit.models import tiny_llama
from ...kit.prompts import random_prompts
from ..parity import assert_engine_agrees, run_script, write_trees

FIRED = {  # in two layers, where it does
    "llama": {
        "products": 2,
        "angles": 1,
        "norms": 5,
        "entries": 8,
        "attention": 2,
        "gates": 2,
        "outputs": 1,
        "few rows": 8,
    },
    "gpt2": {"biases": 8, "entries": 4, "attention": 2, "outputs": 1, "few rows": 8},
    "gemma2": {
        "products": 2,
        "angles": 1,
        "norms": 9,
        "entries": 8,
        "attention": 2,
        "gates": 2,
        "few rows": 9,
    },
}
PROMPT = random_prompts(64, [100], seed=0)[0]
MOST_KERNELS = 10  # a layer
MOST_OF_FEW_ROWS = 7  # up to 16 rows of tokens


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose operators have kernels."""
    monkeypatch.setattr(engine, "WITH_KERNELS", ("cpu", "cuda"))


def fired(engine: TorchEngine) -> dict[str, int]:
    return {name: count for name, count in engine.fused.items() if count}


def opened(bundle: Path, name: str = "torch") -> TorchEngine:
    graph = Bundle.open(bundle)
    found = open_engine(name, graph.graph("target"), graph.target.contract)
    assert isinstance(found, TorchEngine)
    return found


@pytest.mark.parametrize("family", FIRED)
def test_each_row_fires_as_often_as_its_nodes_stand_in_the_graph(pairs, family: str) -> None:
    assert fired(opened(pairs(family).bundle)) == FIRED[family]


def test_before_a_compiler_products_are_merged_and_attention_is_fused(llama) -> None:
    assert fired(opened(llama.bundle, "torch-compiled")) == {"products": 2, "attention": 2}


def test_steps_of_few_and_of_many_rows_multiply_by_the_same_memory(llama) -> None:
    one = opened(llama.bundle)
    names = [name for name in one._constants if name.endswith(".rows")]
    assert len(names) == 8
    for name in names:
        wide, rows = one._constants[name.removesuffix(".rows")], one._constants[name]
        assert wide.data_ptr() == rows.data_ptr()
        assert wide.t().is_contiguous()
        assert rows.is_contiguous()
    ops = [{node.op for node in nodes} for nodes in (one._nodes, one._nodes_of_few)]
    assert ops[0] >= {"MatMul", "trt_spec::AddNorm", "trt_spec::Gate"}
    assert not ops[1] & {"MatMul", "trt_spec::AddNorm", "trt_spec::Gate"}


@pytest.mark.parametrize(("batch", "width", "few"), [(1, 16, True), (4, 4, True), (1, 17, False), (17, 1, False)])
def test_steps_of_up_to_sixteen_rows_of_tokens_are_of_few(llama, batch: int, width: int, few: bool) -> None:
    module = opened(llama.bundle).converted({"batch": batch, "capacity": 32, "rows": 1, "tail": width, "width": width})
    assert ("product" in {str(node.target).rpartition(".")[2] for node in module.graph.nodes}) == few


def test_a_rotation_keeps_the_type_that_the_norm_before_it_gives() -> None:
    """A norm of bfloat16 that gives float32, as the angles are."""
    constants = {"s": torch.rand(8, generator=torch.Generator().manual_seed(0)) + 0.5}
    norm = {"epsilon": 1e-6, "dtype": torch.float32}
    nodes = [
        Node("n", "trt_spec::Norm", ("x", "s"), ("n",), norm),
        Node("r", "RotaryEmbedding", ("n", "cos", "sin"), ("r",), {}),
    ]
    contract: Any = SimpleNamespace(outputs=[SimpleNamespace(name="r")])
    graph = Rewriting(nodes, constants, contract, "cpu")
    assert entries.fuse(graph) == 1
    [node] = graph.in_order()
    values = {
        "x": random(1, 2, 3, 8, dtype=torch.bfloat16).cpu(),
        "cos": random(1, 3, 4).cpu().cos(),
        "sin": random(1, 3, 4).cpu().sin(),
        **constants,
    }
    expected = dict(values)
    for one in nodes:
        run_node(one, expected)
    run_node(node, values)
    assert expected["r"].dtype == torch.float32
    assert torch.equal(values["r"], expected["r"])


def test_what_others_read_as_well_is_made_apart() -> None:
    """A product, a half of a gate and a norm that have another reader; a residual that is no product's."""
    constants = {name: torch.ones(*size) for name, size in {"w": (4, 8), "u": (4, 4), "s": (4,)}.items()}
    constants["columns"] = torch.tensor([4, 4])
    split = Node("split", "Split", ("both", "columns"), ("gate", "up"), {"axis": -1})
    norm = {"epsilon": 1e-6, "dtype": torch.float32}
    nodes = [
        Node("n", "trt_spec::Norm", ("x", "s"), ("n",), norm),
        Node("both", "MatMul", ("n", "w"), ("both",), {}),
        split,
        Node("g", "trt_spec::Gate", ("gate", "up"), ("g",), {"activation": "silu"}),
        Node("z", "MatMul", ("g", "u"), ("z",), {}),
        Node("sum", "Add", ("x", "z"), ("sum",), {}),
    ]
    outputs = ("n", "up", "z", "sum")
    contract: Any = SimpleNamespace(outputs=[SimpleNamespace(name=name) for name in outputs])
    graph = Rewriting(nodes, constants, contract, "cpu")
    assert few_rows.fuse(graph) == 2
    found = [(node.op.removeprefix("trt_spec::"), node.inputs[:1]) for node in graph.in_order()]
    assert sorted(found) == [
        ("Add", ("x",)),
        ("Gate", ("gate",)),
        ("Norm", ("x",)),
        ("Product", ("g",)),
        ("Product", ("n",)),
        ("Split", ("both",)),
    ]
    contract.outputs = contract.outputs[3:]
    graph = Rewriting(nodes, constants | {"w": torch.ones(4, 8), "u": torch.ones(4, 4)}, contract, "cpu")
    assert few_rows.fuse(graph) == 2
    assert [node.inputs for node in graph.in_order()] == [("x", "w.rows", "", "", "s"), ("g", "u.rows", "", "x", "")]


WITHOUT_KERNEL = {"aten._unsafe_view.default"}  # besides views


@pytest.mark.parametrize(("kind", "share"), [("int8", 0.36), ("int4", 0.25), ("fp8", 0.4)])
def test_matrices_of_small_numbers_stay_so_where_there_is_a_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, share: float
) -> None:
    """As on CUDA: the logits are those of the widened matrices, and the constants take a share of their memory."""
    checkpoint = tiny_llama(tmp_path / "checkpoint", hidden_size=64, intermediate_size=96)
    bundle = export_pair(checkpoint, tmp_path / "bundle", weights=Quantisation(kind)).bundle
    narrow = opened(bundle)
    assert narrow.fused["narrow products"] == 2 * 4 + 1
    assert narrow.fused["heads"] == (2 if kind == "int8" else 0)
    assert_engine_agrees(bundle)
    monkeypatch.setattr(engine, "WITH_KERNELS", ())
    wide = opened(bundle)
    taken = [sum(x.nbytes for x in one._constants.values()) for one in (narrow, wide)]
    assert taken[0] < share * taken[1]


@pytest.mark.parametrize(
    ("name", "value"), [("WITH_KERNELS", ("cuda",)), ("find_spec", lambda name: None)], ids=["a CPU", "no Triton"]
)
def test_without_kernels_weights_stay_in_their_file_and_operators_are_what_they_stand_for(
    llama, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    monkeypatch.setattr(engine, name, value)
    plain = opened(llama.bundle)
    assert not {"products", "biases"} & plain.fused.keys()
    nodes = plain.converted(dict.fromkeys(("batch", "capacity", "rows", "tail", "width"), 2)).graph.nodes
    assert not [node for node in nodes if "trt_spec" in str(node.target)]


@pytest.mark.parametrize("family", FIRED)
def test_a_cpu_computes_the_bits_of_the_graph_as_it_was(pairs, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr(engine, "WITH_KERNELS", ())
    bundle, logits = pairs(family).bundle, []
    for rows in (fusing.FUSIONS, ()):
        monkeypatch.setattr(fusing, "FUSIONS", rows)
        one = opened(bundle)
        assert bool(one.fused) == bool(rows)
        logits.append(torch.cat(run_script(one, write_trees(64, one.contract.max_length))))
    assert torch.equal(*logits)


@pytest.mark.parametrize("kind", ["none", "int4"])
def test_a_graph_is_converted_as_for_a_gpu_without_its_weights(llama, tmp_path: Path, kind: str) -> None:
    bundle = export_pair(llama.checkpoint, tmp_path / "bundle", weights=Quantisation(kind)).bundle
    graph = Bundle.open(bundle)
    sizes = dict.fromkeys(("batch", "capacity", "rows", "tail", "width"), 2)
    weightless = TorchEngine(graph.graph("target"), graph.target.contract, "cpu", compiled=False, weightless=True)
    found, expected = (one.converted(sizes) for one in (weightless, opened(bundle)))
    assert found.code == expected.code
    shapes = [{name: (x.shape, x.dtype) for name, x in one.named_buffers()} for one in (found, expected)]
    assert shapes[0] == shapes[1]
    assert any(x.is_meta for x in found.buffers())


class _Counting(TorchDispatchMode):
    """Counts what a GPU would run a kernel for."""

    kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = returns and returns[0].alias_info and not returns[0].alias_info.is_write
        self.kernels += not is_view and str(func) not in WITHOUT_KERNEL
        return func(*args, **(kwargs or {}))


class _Reading(fx.Interpreter):
    """Runs a recorded graph on tensors without data, and tells the kernels of each node."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module.to("meta"))
        self.kernels: list[tuple[str, int]] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        name = str(target).rpartition(".")[2]
        with _Counting() as counting:
            found = super().call_function(target, args, kwargs)
        own = LAUNCHES.get(name, counting.kernels)
        self.kernels.append((name, own if isinstance(own, int) else own(*args, **kwargs)))
        return found


def kernels_of_a_layer(opened: TorchEngine, batch: int, width: int) -> list[tuple[str, int]]:
    """Of the third one: what there is once for all layers, as masks, is computed in the first."""
    sizes = {"batch": batch, "capacity": 512, "rows": width, "tail": width, "width": width}
    reading = _Reading(opened.converted(sizes))
    inputs = [*opened.contract.inputs, *opened._computed]
    shapes = [[sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape] for spec in inputs]
    dtypes = [getattr(torch, spec.dtype) for spec in inputs]
    reading.run(*[torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True)])
    _, first, second = (place for place, (name, _) in enumerate(reading.kernels) if name == "rotate_write")
    return [(name, count) for name, count in reading.kernels[first + 1 : second + 1] if count]


@pytest.mark.parametrize(
    ("kind", "most_of_few", "settings"),
    [
        ("llama", MOST_OF_FEW_ROWS, {}),
        ("qwen3", MOST_OF_FEW_ROWS, {"use_sliding_window": False, "layer_types": ["full_attention"] * 3}),
        ("gemma3_text", MOST_OF_FEW_ROWS + 2, {"layer_types": ["full_attention"] * 3}),
    ],
)
def test_a_layer_has_few_kernels(tmp_path: Path, kind: str, most_of_few: int, settings: dict[str, Any]) -> None:
    """As many as larger models of this form have, since sizes change none of them.

    Gemma's second norms need all of a product's columns, so each is one kernel with the residual and the norm after.
    """
    checkpoint = tiny_checkpoint(kind, tmp_path / "checkpoint", num_hidden_layers=3, **settings)
    bundle = export_pair(checkpoint, tmp_path / "bundle", dtype="bfloat16").bundle
    opened_engine = opened(bundle)
    for batch, width, most in (
        (1, 1, most_of_few),
        (2, 8, most_of_few),
        (1, 17, MOST_KERNELS),
        (8, 5, MOST_KERNELS),
    ):
        found = kernels_of_a_layer(opened_engine, batch, width)
        assert most - 2 < sum(count for _, count in found) <= most, found


def test_entries_of_eight_bits_are_multiplied_by_their_scales_in_place_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "WITH_KERNELS", ())
    bundle = export_pair(tiny_llama(tmp_path / "c"), tmp_path / "b", cache="int8").bundle
    logits = []
    for rows, states in ((fusing.FUSIONS, 4), ((), 0)):
        monkeypatch.setattr(fusing, "FUSIONS", rows)
        one = opened(bundle)
        assert one.fused.get("scales", 0) == states  # keys and values of two layers
        logits.append(engine_logits(one, PROMPT))
    assert torch.equal(*logits)
